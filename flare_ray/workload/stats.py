"""Quantiles, and ratios of two arms over the same conversations with an interval.

Two arms are compared by their speed over equal sessions: tokens by seconds, sums before division.
The interval resamples *sessions*, not requests, since turns of one conversation are not independent
and a disturbance of the machine rarely meets one turn alone (paired bootstrap, percentiles).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
COVERAGE = 0.95
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Cluster = tuple[object, ...]
"""What identifies a session in both arms."""
Work = Mapping[Cluster, tuple[float, float]]
"""Tokens and seconds of each session of an arm."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one arm over that of another.

    Attributes:
        lower / upper: of the interval.
        sessions: pairs that it rests on.
    """

    ratio: float
    lower: float
    upper: float
    sessions: int


def tails(values: Sequence[float]) -> dict[str, float]:
    """Quantiles by name; empty without values."""
    if not values:
        return {}
    return {name: float(np.quantile(values, share)) for name, share in SHARES.items()}


def speed(work: Work) -> float:
    """Tokens a second over all sessions; 0 without any.

    Raises:
        ZeroDivisionError: the sessions took no time.
    """
    tokens, seconds = (sum(pair[place] for pair in work.values()) for place in (0, 1))
    return tokens / seconds if work else 0.0


def speed_ratio(
    ours: Work, theirs: Work, *, coverage: float = COVERAGE, seed: int = 1
) -> Ratio | None:
    """Our speed over theirs, over the sessions that both have run; None without any."""
    found = _resampled(ours, theirs, seed)
    if found is None:
        return None
    ratio, drawn, sessions = found
    return Ratio(ratio, *_interval(drawn, coverage), sessions)


def ratio_of_ratios(
    new: tuple[Work, Work],
    old: tuple[Work, Work],
    *,
    coverage: float = COVERAGE,
    seed: int = 1,
) -> Ratio | None:
    """How an arm's speed relative to a reference of its own run has changed between two runs.

    Each run is divided by its own reference first, so that a slower machine, or a busier one,
    changes both and cancels out. The runs are resampled independently.

    Args:
        new / old: (arm, reference) of each run.
    """
    later, earlier = _resampled(*new, seed), _resampled(*old, seed + 1)
    if later is None or earlier is None:
        return None
    (ratio_new, drawn_new, count), (ratio_old, drawn_old, other) = later, earlier
    interval = _interval(drawn_new / drawn_old, coverage)
    return Ratio(ratio_new / ratio_old, *interval, min(count, other))


def _resampled(ours: Work, theirs: Work, seed: int) -> tuple[float, np.ndarray, int] | None:
    """Our speed over theirs, the same of every resample, and the sessions that both have run."""
    shared = [name for name in ours if name in theirs and ours[name][1] > 0 and theirs[name][1] > 0]
    if not shared:
        return None
    table = np.array([(*ours[name], *theirs[name]) for name in shared], dtype=float)
    whole = float(_ratio(table.sum(0)[None])[0])
    return whole, _ratio(_draws(len(shared), seed) @ table), len(shared)


def _interval(ratios: np.ndarray, coverage: float) -> tuple[float, float]:
    low, high = np.quantile(ratios, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def _draws(sessions: int, seed: int) -> np.ndarray:
    """[RESAMPLES, sessions] counts of how often each session is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(sessions, np.full(sessions, 1 / sessions), RESAMPLES).astype(float)


def _ratio(sums: np.ndarray) -> np.ndarray:
    """[n, 4] sums of our tokens and seconds and theirs -> [n] ratios of speed."""
    ratios: np.ndarray = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    return ratios

"""What all requests together tell: survival by depth, and how much requests differ.

The prior of every request's own estimate (`survival`), and the watch for a change of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flare_ray.contracts.shapes import MAX_WIDTH

MAX_DRAFTS = MAX_WIDTH - 1
FIRST_DEPTH_PRIOR = 0.6
"""Guess for depth 1 before anything was measured; decides little beyond the first rounds."""
WORKLOAD_STRENGTH = 8.0
"""Tests that weigh as much as the prior an estimate is shrunk to."""
WORKLOAD_DECAY = 0.995
"""Weight of the past at each round that tested something: a memory of 200 rounds."""
RECENT_DECAY = 0.8
"""Memory of the watch for changes: about five rounds."""
QUIET_DECAY = 0.98
"""The same per round that offered nothing, which are a hundred between two probes."""
SURPRISE = 5.0
"""Squared deviations of recent outcomes from their forecast, in variances, that mean a change."""
HINT = 0.25
"""Share of recent tests that passed beyond the forecast from which on more tests are wanted."""
KEPT_AFTER_CHANGE = 0.15
"""Share of the evidence that a change leaves."""
MOST_AFTER_CHANGE = 8.0
"""Tests of the workload that a change leaves at most: of many lanes a share alone would still
outweigh the round that showed it."""
SPREAD_PRIOR = 0.4
SPREAD_PRIOR_WEIGHT = 4.0
LEAST_SPREAD = 0.03
MOST_SPREAD = 2.0
SPREAD_DECAY = 0.998
CHANCE_SHARE = 0.6
_CHANCE_LIMIT = 0.995

Floats = NDArray[np.float64]


class Workload:
    """Decayed tests and passes by depth over all requests; depth 1 first.

    Attributes:
        hints_at_better: the last tests passed so much more often than forecast that more of them
            should tell.
    """

    def __init__(self) -> None:
        self._tested = [0.0] * MAX_DRAFTS
        self._passed = [0.0] * MAX_DRAFTS
        self._surprise = 0.0
        self._variance = 0.0
        self._recent = 0.0
        self.hints_at_better = False
        self._known: Floats | None = None

    def observe(
        self, tested: Sequence[int], passed: Sequence[int], surprise: float, variance: float
    ) -> None:
        """Add one round's counts.

        Depths it did not test keep their weight, unless it shows that the texts have changed: what
        deep drafts did in others tells nothing any more, and they are judged by the shallow ones.
        """
        self._surprise = self._surprise * RECENT_DECAY + surprise
        self._variance = self._variance * RECENT_DECAY + variance
        self._recent = self._recent * RECENT_DECAY + sum(tested)
        self.hints_at_better = self._surprise > HINT * self._recent
        keep, changed = WORKLOAD_DECAY, False
        if self._surprise**2 > SURPRISE * self._variance + 1.0:
            keep, changed = KEPT_AFTER_CHANGE, True
            self._surprise = self._variance = self._recent = 0.0
        for depth, count in enumerate(tested):
            if count or changed:
                share = keep
                if changed:
                    share = min(keep, MOST_AFTER_CHANGE / max(self._tested[depth], 1.0))
                self._tested[depth] = self._tested[depth] * share + count
                self._passed[depth] = self._passed[depth] * share + passed[depth]
        self._known = None

    def quiet(self, rounds: int = 1) -> None:
        """So many rounds tested nothing: what the last tests were surprised by fades, or a single
        probe could never tell a change from the noise of others long ago."""
        kept = QUIET_DECAY**rounds
        self._surprise *= kept
        self._variance *= kept
        self._recent *= kept

    @property
    def chances(self) -> Floats:
        """[7]: conditional chance by depth; not to be written to."""
        if self._known is None:
            self._known = self._chances()
        return self._known

    def _chances(self) -> Floats:
        chances = []
        prior = FIRST_DEPTH_PRIOR
        for tested, passed in zip(self._tested, self._passed, strict=True):
            prior = (passed + WORKLOAD_STRENGTH * prior) / (tested + WORKLOAD_STRENGTH)
            chances.append(min(prior, _CHANCE_LIMIT))
        return np.array(chances)


class Spread:
    """How much requests differ: the variance of their shifts, in logits.

    A request whose forecast variance is V and whose shift is s passes about V s more tests than
    forecast, besides chance of variance V / 2 (older tests weigh less): the mean of (excess^2 - V /
    2) over that of V^2 estimates the variance.
    """

    def __init__(self) -> None:
        self._excess = SPREAD_PRIOR * SPREAD_PRIOR_WEIGHT
        self._square = SPREAD_PRIOR_WEIGHT
        self.strength = 4.0 / SPREAD_PRIOR

    def observe(self, excess: Floats, variance: Floats) -> None:
        """Rows of one round."""
        rows = len(excess)
        found = float(excess @ excess) - CHANCE_SHARE * float(variance.sum())
        self._add(found / rows, float(variance @ variance) / rows, rows)

    def observe_few(self, rows: Sequence[tuple[float, float]], rounds: int) -> None:
        """As `observe`: (excess, variance) per row, after so many rounds."""
        found = sum(excess * excess - CHANCE_SHARE * variance for excess, variance in rows)
        square = sum(variance * variance for _, variance in rows)
        self._add(found / len(rows), square / len(rows), len(rows) * rounds)

    def _add(self, found: float, square: float, rows: int) -> None:
        gain = 1.0 - SPREAD_DECAY**rows
        self._excess += gain * (found - self._excess)
        self._square += gain * (square - self._square)
        spread = self._excess / max(self._square, 1e-9)
        self.strength = 4.0 / min(max(spread, LEAST_SPREAD), MOST_SPREAD)

"""Acceptance traces: how far drafts get at every position of every lane's text.

Text decides acceptance, so a trace is indexed by position, not by round: who emits faster goes
through the same text sooner. Every policy meets the same text and the same luck (one uniform number
per position decides how many drafts are accepted there), so that differences between policies are
their own.

- recorded: requests of the demo checkpoint by category (`benchmarks.policy.record`); each stretch
  of some rounds becomes a class with the chances estimated around it.
- synthetic: one class, or classes by lane.
- shifting: texts that turn, and workloads that turn for every lane at the same round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flare_ray.contracts.shapes import MAX_WIDTH

RECORDED = Path(__file__).parent / "recorded.json"
DEPTHS = MAX_WIDTH - 1
MAX_LANES = 256
REQUEST_TOKENS = 192
"""Mean length of a synthetic request."""
STRETCH_ROUNDS = 6
"""Recorded rounds that share a class."""
STRENGTH = 4.0
"""Tests that weigh as much as the category when a stretch's chances are estimated."""

CATEGORY_TRACES = {
    "prose": ("docs", "define"),
    "structured": ("json", "tool", "recall"),
    "edit": ("edit", "code"),
    "mixed": (
        *("docs", "define", "json", "tool", "recall"),
        *("edit", "code", "chat", "story", "math"),
    ),
}
"""Recorded traces and the categories whose requests they hold."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """One workload.

    Attributes:
        chances: [C, 7], conditional acceptance by depth of each class.
        classes: [256, L] int16, class at each position of each lane's text.
        requests: [256, L] int32, number of the lane's request at each position.
        turns: rounds at which the workload turns, and what is added to every class from then on.
        shifting: whether chances change inside a request or over the run.
        draws: of `drawn`, kept.
    """

    name: str
    chances: Floats
    classes: NDArray[np.int16]
    requests: NDArray[np.int32]
    turns: tuple[tuple[int, int], ...] = ((0, 0),)
    shifting: bool = False
    draws: dict[int, NDArray[np.int8]] = field(default_factory=dict)

    @property
    def survival(self) -> Floats:
        """[C, 7]: chance that the first d drafts all pass."""
        survival: Floats = np.asarray(np.cumprod(self.chances, 1), dtype=np.float64)
        return survival

    @property
    def expected(self) -> Floats:
        """[C, 8]: tokens a round with k drafts emits."""
        ones = np.ones((len(self.chances), 1))
        return np.cumsum(np.concatenate([ones, self.survival], 1), 1)

    def drawn(self, offset: int) -> NDArray[np.int8]:
        """[256, L]: drafts accepted at each position if all seven are offered."""
        known = self.draws.get(offset)
        if known is not None:
            return known
        luck = np.random.default_rng(20_261).random(self.classes.shape, dtype=np.float32)
        survival = self.survival.astype(np.float32)
        found = np.zeros(self.classes.shape, dtype=np.int8)
        classes = self.classes + offset
        for depth in range(DEPTHS):
            found += luck < survival[:, depth][classes]
        self.draws[offset] = found
        return found


def length_of(rounds: int) -> int:
    """Positions that a lane can reach in so many rounds."""
    return rounds * MAX_WIDTH + MAX_WIDTH


@dataclass(frozen=True)
class Synthetic:
    """How a synthetic trace is made.

    Attributes:
        curves: conditional chances by depth; a shorter one repeats its last.
        by_request: every request follows a curve of its own, drawn at random.
        phase_tokens: mean tokens after which a text turns to the next curve; 0 = never.
        turns: as in `Trace`; with it every lane follows the curve of its turn.
    """

    name: str
    curves: Sequence[Sequence[float]]
    by_request: bool = False
    phase_tokens: int = 0
    turns: tuple[tuple[int, int], ...] = ((0, 0),)

    def make(self, rounds: int, lanes: int = MAX_LANES) -> Trace:
        """Texts long enough for so many rounds."""
        length = length_of(rounds)
        rng = np.random.default_rng(7)
        rows = [list(c) + [c[-1]] * (DEPTHS - len(c)) for c in self.curves]
        classes = np.zeros((lanes, length), dtype=np.int16)
        if self.phase_tokens:
            phases = _ordinals(rng, length, self.phase_tokens, lanes)
            classes[:] = (phases + np.arange(lanes)[:, None]) % len(rows)
        requests = _ordinals(rng, length, REQUEST_TOKENS, lanes)
        if self.by_request:
            drawn = rng.integers(len(rows), size=(lanes, int(requests.max()) + 1))
            classes[:] = np.take_along_axis(drawn, requests.astype(np.int64), 1)
        shifting = bool(self.phase_tokens) or len(self.turns) > 1
        return Trace(self.name, np.array(rows), classes, requests, self.turns, shifting)


def _ordinals(rng: np.random.Generator, length: int, mean: int, lanes: int) -> NDArray[np.int32]:
    """[lanes, length]: how many boundaries lie at or before each position, every lane its own."""
    ordinals = np.zeros((lanes, length), dtype=np.int32)
    for lane in range(lanes):
        count = 2 * length // mean + 2
        gaps = rng.integers(mean // 2, mean * 3 // 2, count)
        gaps[0] = rng.integers(1, mean)
        marks = np.cumsum(gaps)
        np.add.at(ordinals[lane], marks[marks < length], 1)
    return np.cumsum(ordinals, 1, dtype=np.int32)


def recorded(name: str, categories: Sequence[str], rounds: int, path: Path = RECORDED) -> Trace:
    """The demo checkpoint's requests of some categories, in random order on every lane."""
    texts = json.loads(path.read_text(encoding="utf-8"))["acceptance"]
    length = length_of(rounds)
    chances: list[Floats] = []
    pieces: list[NDArray[np.int16]] = []
    for category in categories:
        requests = [np.array([int(c) for c in text]) for text in texts[category] if len(text) > 1]
        whole = _hazards(np.concatenate(requests), np.full(DEPTHS, 0.6), 1.0)
        for accepted in requests:
            own = _hazards(accepted, whole, 2 * STRENGTH)
            piece = []
            for start in range(0, len(accepted), STRETCH_ROUNDS):
                around = accepted[max(0, start - 2) : start + STRETCH_ROUNDS + 2]
                piece.append(
                    np.full(int((accepted[start : start + STRETCH_ROUNDS] + 1).sum()), len(chances))
                )
                chances.append(_hazards(around, own, STRENGTH))
            pieces.append(np.concatenate(piece).astype(np.int16))
    rng = np.random.default_rng(11)
    classes = np.zeros((MAX_LANES, length), dtype=np.int16)
    requests_of = np.zeros((MAX_LANES, length), dtype=np.int32)
    for lane in range(MAX_LANES):
        place = number = 0
        while place < length:
            piece_ = pieces[rng.integers(len(pieces))]
            if not place:
                piece_ = piece_[rng.integers(len(piece_)) :]
            end = min(length, place + len(piece_))
            classes[lane, place:end] = piece_[: end - place]
            requests_of[lane, place:end] = number
            place, number = end, number + 1
    return Trace(name, np.array(chances), classes, requests_of)


def _hazards(accepted: NDArray[np.int64], prior: Floats, strength: float) -> Floats:
    """Conditional chances by depth from full-depth rounds, shrunk to `prior`."""
    passed = np.array([(accepted > depth).sum() for depth in range(DEPTHS)], dtype=float)
    tested = np.concatenate([[len(accepted)], passed[:-1]])
    return np.clip((passed + strength * prior) / (tested + strength), 0.01, 0.995)


def all_traces(rounds: int) -> dict[str, Callable[[], Trace]]:
    """Makers of every trace by name; recorded ones first."""
    half, third = rounds // 2, rounds // 3
    made = (
        Synthetic("useless", [(0.03,)]),
        Synthetic("poor", [(0.35,)]),
        Synthetic("fair", [(0.65, 0.6, 0.55)]),
        Synthetic("good", [(0.85,)]),
        Synthetic("copying", [(0.97,)]),
        Synthetic("cliff", [(0.95, 0.92, 0.9, 0.06)]),
        Synthetic("unequal", [(0.95,), (0.2,)], by_request=True),
        Synthetic("turning", [(0.95,), (0.4,)], phase_tokens=320),
        Synthetic("shift-up", [(0.4,), (0.95,)], turns=((0, 0), (half, 1))),
        Synthetic(
            "shift-twice",
            [(0.9,), (0.3,), (0.75, 0.7)],
            turns=((0, 0), (third, 1), (2 * third, 2)),
        ),
    )
    makers: dict[str, Callable[[], Trace]] = {
        name: partial(recorded, name, listed, rounds) for name, listed in CATEGORY_TRACES.items()
    }
    return makers | {synthetic.name: partial(synthetic.make, rounds) for synthetic in made}

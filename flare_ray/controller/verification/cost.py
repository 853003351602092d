"""What a round of each program costs now: robust means of complete rounds as they ran (contract:
C2).

Costs drift together (contexts grow, a neighbour takes a core), and a program that has not run for a
while would keep an old price. So each sample is kept relative to a common level that follows every
round, and an estimate is the program's relative cost at today's level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from flare_ray.contracts.shapes import GraphShape

SAMPLES = 24
"""Rounds remembered per program."""
TRUSTED_SAMPLES = 3
"""Below so many, one disturbed round could decide: the program is worth a probe."""
LEVEL_STEP = 0.05
"""Weight of one round in the common level: a memory of some 20 rounds."""
LEVEL_CLIP = 2.0
"""A single round moves the level at most as if it had cost so many times more, or less."""
ROW_SHARE = 0.2
"""Guessed cost of one more row per lane over that of a width-one round, before any measurement."""


@dataclass(slots=True)
class _Samples:
    """Relative costs of one program."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    mean: float = 0.0
    last_round: int = 0

    def add(self, value: float, round_number: int) -> None:
        self.values.append(value)
        self.last_round = round_number
        ordered = sorted(self.values)
        quarter = len(ordered) // 4
        middle = ordered[quarter : len(ordered) - quarter]
        self.mean = sum(middle) / len(middle)


class CostTable:
    """Prices of programs, in nanoseconds.

    Args:
        measured_ns: start-up measurements; each counts as one sample.
    """

    def __init__(self, measured_ns: Mapping[GraphShape, int] | None = None) -> None:
        self.rounds = 0
        self._level = 1.0
        self._samples: dict[GraphShape, _Samples] = {}
        self._guesses: dict[GraphShape, float] = {}
        for shape, cost_ns in (measured_ns or {}).items():
            self._samples.setdefault(shape, _Samples()).add(float(cost_ns), 0)

    def observe(self, shape: GraphShape, cost_ns: int) -> None:
        """One complete round of `shape` took `cost_ns` > 0."""
        self.rounds += 1
        samples = self._samples.get(shape)
        if samples is None:
            samples = self._samples[shape] = _Samples()
        elif len(samples.values) >= TRUSTED_SAMPLES:
            ratio = cost_ns / (samples.mean * self._level)
            ratio = min(max(ratio, 1.0 / LEVEL_CLIP), LEVEL_CLIP)
            self._level *= 1.0 + LEVEL_STEP * (ratio - 1.0)
        few = len(samples.values) < TRUSTED_SAMPLES
        samples.add(cost_ns / self._level, self.rounds)
        if few:
            self._guesses.clear()

    def is_trusted(self, shape: GraphShape) -> bool:
        """Whether enough rounds of it were measured."""
        samples = self._samples.get(shape)
        return samples is not None and len(samples.values) >= TRUSTED_SAMPLES

    def age_rounds(self, shape: GraphShape) -> int:
        """Rounds of any program since it last ran; all of them if it never did."""
        samples = self._samples.get(shape)
        return self.rounds - (samples.last_round if samples is not None else 0)

    def estimate_ns(self, shape: GraphShape) -> float:
        """Price of a round now; a guess from its neighbours if it never ran."""
        samples = self._samples.get(shape)
        if samples is not None:
            return samples.mean * self._level
        guess = self._guesses.get(shape)
        if guess is None:
            guess = self._guesses[shape] = self._guess(shape)
        return guess * self._level

    def _guess(self, shape: GraphShape) -> float:
        """Relative cost of a program that never ran.

        1. Between two measured widths of its batch capacity: linear.
        2. Beyond them: the nearest one, scaled by the assumed share of a row.
        3. No width of its capacity measured: the nearest capacity stands for it.
        """
        known = {
            other: samples.mean
            for other, samples in self._samples.items()
            if other.kind is shape.kind
        }
        if not known:
            return _assumed(shape.verify_width)
        distance = min(abs(o.batch_capacity - shape.batch_capacity) for o in known)
        near = sorted(
            (other.verify_width, mean)
            for other, mean in known.items()
            if abs(other.batch_capacity - shape.batch_capacity) == distance
        )
        width = shape.verify_width
        below = [entry for entry in near if entry[0] <= width]
        above = [entry for entry in near if entry[0] >= width]
        if below and above:
            (low, low_cost), (high, high_cost) = below[-1], above[0]
            if low == high:
                return low_cost
            return low_cost + (high_cost - low_cost) * (width - low) / (high - low)
        nearest, cost = below[-1] if below else above[0]
        return cost * _assumed(width) / _assumed(nearest)


def _assumed(width: int) -> float:
    return 1.0 + ROW_SHARE * (width - 1)

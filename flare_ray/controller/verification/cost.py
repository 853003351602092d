"""What a round of each program costs now: robust means of complete rounds as they ran (contract:
C2).

Only the ratio between programs decides, and what disturbs one round usually disturbs its
neighbours in time, so two corrections keep programs comparable that run at different times:

- *level*, slow: costs drift together (contexts grow). Whenever a full window's mean changes, the
  level changes by the same factor, and every other program's price is read at today's level. For a
  single program the factors multiply to (its mean now / its mean then): the level carries that
  window's noise and never wanders.
- *pace*, fast: a busy neighbour stretches some dozen rounds. The cost of a program that seldom runs
  is divided by how much dearer than their price the other programs' rounds just before it were.

Dividing by the pace leaves a common factor free, which would wander where many programs take turns;
so every round also pulls all prices together a little towards what it really cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flare_ray.contracts.shapes import GraphShape

SAMPLES = 48
"""Rounds remembered per program."""
TRUSTED_SAMPLES = 3
"""Below so many, one disturbed round could decide: the program is worth a probe."""
RECENT_ROUNDS = 9
"""Rounds whose median cost over price is the pace."""
PACE_ROUNDS = 7
"""Recent rounds of other programs that a pace needs: only a program that runs seldom has one."""
PULL = 0.02
PULL_CLIP = 0.3
"""Share of a round's relative error by which all prices move, and the largest error that counts:
the common factor is found within some 50 rounds, and a disturbed round hardly moves it."""
UNTRUSTED_SURCHARGE = 2.0
"""A width that is not trusted yet counts at most so many times dearer per row than the nearest
trusted narrower one."""
ROW_SHARE = 0.2
"""Guessed cost of one more row per lane over that of a width-one round, before any measurement."""


@dataclass(slots=True)
class _Samples:
    """Costs of one program, expressed at `level`."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    mean: float = 0.0
    level: float = 1.0
    last_round: int = 0

    def express_at(self, level: float) -> None:
        """Rescale what was measured at another level."""
        if self.level != level:
            factor = level / self.level
            self.values = deque((value * factor for value in self.values), maxlen=SAMPLES)
            self.mean *= factor
            self.level = level

    def add(self, value: float) -> None:
        self.values.append(value)
        self.mean = _robust_mean(self.values)


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
        self._recent: deque[tuple[GraphShape, float]] = deque(maxlen=RECENT_ROUNDS)
        for shape, cost_ns in (measured_ns or {}).items():
            self._samples.setdefault(shape, _Samples()).add(float(cost_ns))

    def observe(self, shape: GraphShape, cost_ns: int) -> None:
        """One complete round of `shape` took `cost_ns` > 0."""
        self.rounds += 1
        samples = self._samples.get(shape)
        if samples is None:
            samples = self._samples[shape] = _Samples()
        samples.express_at(self._level)
        if len(samples.values) < TRUSTED_SAMPLES:
            self._guesses.clear()
        full, before = len(samples.values) == SAMPLES, samples.mean
        pace = self._pace(shape)
        trusted = len(samples.values) >= TRUSTED_SAMPLES
        if trusted:
            self._recent.append((shape, cost_ns / before))
        samples.add(cost_ns / pace)
        if full:
            self._level *= samples.mean / before
            samples.level = self._level
        if trusted:
            error = min(max(cost_ns / before - 1.0, -PULL_CLIP), PULL_CLIP)
            self._level *= 1.0 + PULL * error
        samples.last_round = self.rounds

    def _pace(self, shape: GraphShape) -> float:
        """How much dearer than their price the last rounds of other programs were."""
        others = sorted(ratio for other, ratio in self._recent if other != shape)
        return others[len(others) // 2] if len(others) >= PACE_ROUNDS else 1.0

    def samples(self, shape: GraphShape) -> int:
        """Rounds of it that its price rests on, 0 .. SAMPLES."""
        samples = self._samples.get(shape)
        return len(samples.values) if samples is not None else 0

    def is_trusted(self, shape: GraphShape) -> bool:
        """Whether enough rounds of it were measured."""
        return self.samples(shape) >= TRUSTED_SAMPLES

    def age_rounds(self, shape: GraphShape) -> int:
        """Rounds of any program since it last ran; all of them if it never did."""
        samples = self._samples.get(shape)
        return self.rounds - (samples.last_round if samples is not None else 0)

    def estimate_ns(self, shape: GraphShape) -> float:
        """Price of a round now; a guess from its neighbours if it never ran."""
        samples = self._samples.get(shape)
        if samples is not None:
            return samples.mean * self._level / samples.level
        guess = self._guesses.get(shape)
        if guess is None:
            guess = self._guesses[shape] = self._guess(shape)
        return guess * self._level

    def prices_ns(self, candidates: Sequence[GraphShape]) -> list[float]:
        """Estimates of programs that differ in width alone, narrowest first.

        A program not yet trusted is held between the trusted ones beside it, because a wider round
        of the same lanes never costs less, and below a multiple of the narrower one: one disturbed
        sample cannot price it out of ever being measured again.
        """
        prices = [self.estimate_ns(shape) for shape in candidates]
        trusted = [self.is_trusted(shape) for shape in candidates]
        ceiling = math.inf
        for place in range(len(candidates) - 1, -1, -1):
            if trusted[place]:
                ceiling = prices[place]
            else:
                prices[place] = min(prices[place], ceiling)
        floor, narrower = 0.0, 0
        for place, shape in enumerate(candidates):
            if trusted[place]:
                floor, narrower = prices[place], shape.verify_width
            elif narrower:
                most = UNTRUSTED_SURCHARGE * floor * shape.verify_width / narrower
                prices[place] = min(max(prices[place], floor), most)
        return prices

    def _guess(self, shape: GraphShape) -> float:
        """Cost at level 1 of a program that never ran.

        1. Between two measured widths of its batch capacity: linear.
        2. Beyond them: the nearest one, scaled by the assumed share of a row.
        3. No width of its capacity measured: the nearest capacity stands for it.
        """
        known = {
            other: samples.mean / samples.level
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


def _robust_mean(values: deque[float]) -> float:
    """Mean of the middle half; the smaller of two, since disturbances only ever add time."""
    ordered = sorted(values)
    if len(ordered) < TRUSTED_SAMPLES:
        return ordered[0]
    cut = max(1, len(ordered) // 4)
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def _assumed(width: int) -> float:
    return 1.0 + ROW_SHARE * (width - 1)

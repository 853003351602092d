"""What a round of each program costs now, from complete rounds as they ran (contract: C2).

The model is a product: price = level * relative price of the program.

- The *level* follows every round of any program within some three rounds: growing contexts, a busy
  neighbour, a throttled clock move all programs together, and only ratios decide.
- A program's *relative price* follows its own rounds, measured against the level of that moment, by
  a mean whose memory grows to MEMORY_ROUNDS. So a program that seldom runs, and runs just while
  everything is slow, is not blamed for it. A round counts as far as the level rests on rounds of
  other programs: of a program that runs alone nothing but the level can be learnt, so its price
  grows no surer either.

Both are robust: a price follows the median of its program's last three rounds, the level that of
the last three of any. A program starts at its start-up measurement if there is one, which counts as
few rounds of its own; else at the median of its first rounds, and is trusted once three of them
agree, since a start that rests on a disturbed round would price the program out of being run again.

A wider round of the same lanes never costs less: a price that says so is lowered to the wider one's
(`prices_ns`). That decides nothing wrongly, since at one price the wider program is worth more, and
lets a probe that costs nothing find out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flare_ray.contracts.shapes import GraphShape

LEVEL_GAIN = 0.3
"""Share of a round's error by which the level moves."""
MEMORY_ROUNDS = 64
"""Rounds that a relative price averages over in the long run."""
CLIP = 0.35
"""Largest error, as a logarithm, by which a round counts, some four standard deviations of a noisy
host's rounds: two disturbed ones in a row pass every median of three."""
MEASURED_WEIGHT = 4.0
GUESS_WEIGHT = 0.25
"""Rounds that a start-up measurement and a guess count as."""
TRUSTED_SAMPLES = 3
"""So many first rounds must agree; with fewer, disturbed ones could decide: worth a probe."""
AGREEMENT = 1.3
"""Rounds agree that are no further apart than by this factor."""
MOST_STARTS = 7
"""A program whose rounds do not agree is trusted after so many."""
UNTRUSTED_SURCHARGE = 2.0
"""A width that is not trusted yet counts at most so many times dearer per row than the nearest
trusted narrower one."""
ROW_SHARE = 0.2
"""Guessed cost of one more row per lane over that of a width-one round, before any measurement."""
NOISE_DECAY = 0.95
LEAST_NOISE = 0.005


@dataclass(slots=True, eq=False)
class Price:
    """What is known of one program's cost.

    Attributes:
        relative: price over the level; a guess while nothing is known.
        weight: rounds it counts as, its start included, each as far as it taught something; 0 = a
            guess that nothing supports.
        samples: rounds of its own; never above MEMORY_ROUNDS.
        last_round: the table's round in which it last ran; 0 = never.
        share: part of the level that rested on its own rounds after its last one.
        is_trusted: enough rounds of it were measured, here or at start-up.
        before: costs over the level of its last two rounds, the older first; 0 = none.
        starts: costs over the level of its first rounds, ascending; () once it is trusted.
        rows_a_lane: target rows a lane: its width, or what a packed round has for each on average.
    """

    shape: GraphShape
    relative: float = 1.0
    weight: float = 0.0
    samples: int = 0
    last_round: int = 0
    share: float = 0.0
    is_trusted: bool = False
    before: tuple[float, float] = (0.0, 0.0)
    starts: tuple[float, ...] = ()
    rows_a_lane: float = field(init=False)
    is_packed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rows_a_lane = self.shape.rows / self.shape.batch_capacity
        self.is_packed = self.shape.packed_capacity > 0

    def start(self, raw: float) -> None:
        """One of its first rounds: its price becomes the median of them, the lower of two, since
        whatever disturbs a round adds to it."""
        self.before = (self.before[1], raw)
        starts = self.starts = tuple(sorted((*self.starts, raw)))
        middle = starts[(len(starts) - 1) // 2]
        # The guess still counts as GUESS_WEIGHT rounds beside a single one.
        gain = 1.0 / (1.0 + GUESS_WEIGHT) if len(starts) == 1 else 1.0
        self.relative *= (middle / self.relative) ** gain
        self.weight = len(starts) + GUESS_WEIGHT
        near = sum(middle <= other * AGREEMENT and other <= middle * AGREEMENT for other in starts)
        if near >= TRUSTED_SAMPLES or len(starts) == MOST_STARTS:
            self.is_trusted, self.starts = True, ()

    def filtered(self, raw: float) -> float:
        """Median of this round and its last two, mean of two unless one is disturbed: a single
        disturbed round never moves a price."""
        older, old = self.before
        self.before = (old, raw)
        if not old:
            return raw
        if not older:
            return (old + raw) / 2 if max(old, raw) < 1.5 * min(old, raw) else min(old, raw)
        return max(min(older, old), min(max(older, old), raw))


class CostTable:
    """Prices of programs, in nanoseconds.

    Args:
        measured_ns: start-up measurements.

    Attributes:
        rounds: completed rounds; `last_drafted` = the last one that drafted; 0 = none.
    """

    def __init__(self, measured_ns: Mapping[GraphShape, int] | None = None) -> None:
        self.rounds = 0
        self.last_drafted = 0
        self._deviation = 0.08
        self._level = 1.0
        self._recent = (1.0, 1.0)
        self._guesses_hold = False
        self._prices = {
            shape: Price(shape, float(cost), MEASURED_WEIGHT, is_trusted=True)
            for shape, cost in (measured_ns or {}).items()
        }

    @property
    def noise(self) -> float:
        """Standard deviation of a round's cost over its price; the mean absolute deviation of a
        normal variable is 0.8 of it."""
        return max(self._deviation / 0.8, LEAST_NOISE)

    def price(self, shape: GraphShape) -> Price:
        """What is known of a program; the same object for ever."""
        price = self._prices.get(shape)
        if price is None:
            price = self._prices[shape] = Price(shape)
            self._guesses_hold = False
        return price

    def observe(self, shape: GraphShape, cost_ns: int) -> None:
        """One complete round of `shape` took `cost_ns` > 0."""
        self.rounds += 1
        if shape.draft_tokens:
            self.last_drafted = self.rounds
        price = self.price(shape)
        raw = cost_ns / self._level
        if price.is_trusted:
            self._refine(price, raw)
        else:
            if not price.weight:
                known = self._known(shape)
                price.relative = _guess(price, known) if known else raw
            price.start(raw)
            self._guesses_hold = False
        price.samples = min(price.samples + 1, MEMORY_ROUNDS)
        price.last_round = self.rounds

    def _refine(self, price: Price, raw: float) -> None:
        """Move a trusted program's relative price, and the level.

        Two rounds in turn far below a price prove it wrong, since nothing makes a round shorter: it
        starts again at them. Above it they may both be disturbed.
        """
        # Only what others' rounds say of the level tells anything about this program.
        others = self.rounds - price.last_round - 1
        share = price.share * (1.0 - LEVEL_GAIN) ** others
        cheapest = max(raw, price.before[1])
        if price.before[1] and share < 0.5 and cheapest < price.relative * math.exp(-CLIP):
            price.relative, price.weight = cheapest, 1.0
        error = _clipped(math.log(price.filtered(raw) / price.relative))
        price.weight = min(price.weight + 1.0 - share, MEMORY_ROUNDS)
        price.relative *= math.exp(error * (1.0 - share) / price.weight)
        price.share = share + LEVEL_GAIN * (1.0 - share)
        # The same location as a price follows, or the two would drift apart.
        error = _clipped(math.log(self._median(raw / price.relative)))
        self._level *= math.exp(LEVEL_GAIN * error)
        self._deviation += (abs(error) - self._deviation) * (1.0 - NOISE_DECAY)

    def _median(self, ratio: float) -> float:
        """Median of the last three rounds' costs over their prices, any program's."""
        older, old = self._recent
        self._recent = (old, ratio)
        return max(min(older, old), min(max(older, old), ratio))

    def estimate_ns(self, shape: GraphShape) -> float:
        """Price of a round now; a guess from its neighbours if it never ran."""
        return self.price_ns(self.price(shape))

    def price_ns(self, program: Price) -> float:
        """As `prices_ns` of one program alone."""
        if not self._guesses_hold:
            self._renew_guesses()
        return program.relative * self._level

    def prices_ns(self, candidates: Sequence[Price]) -> list[float]:
        """Estimates of programs that hold the same lanes, narrowest first.

        None is above a trusted wider one's, because a wider round of the same lanes never costs
        less; a program not yet trusted is also held above the trusted narrower ones, and below a
        multiple of them.
        """
        if not self._guesses_hold:
            self._renew_guesses()
        level = self._level
        prices = [price.relative * level for price in candidates]
        ceiling, trusted = math.inf, True
        for place in range(len(candidates) - 1, -1, -1):
            if prices[place] > ceiling:
                prices[place] = ceiling
            if candidates[place].is_trusted:
                ceiling = prices[place]
            else:
                trusted = False
        if not trusted:
            _hold_above_narrower(candidates, prices)
        return prices

    def _renew_guesses(self) -> None:
        for price in self._prices.values():
            if not price.weight:
                known = self._known(price.shape)
                price.relative = _guess(price, known) if known else 1.0
        self._guesses_hold = True

    def _known(self, shape: GraphShape) -> list[Price]:
        """Programs of the same kind of which something is known; rounds of copies alone, which run
        no drafter, say nothing of others."""
        return [
            p
            for p in self._prices.values()
            if p.weight
            and p.shape.kind is shape.kind
            and (p.shape.draft_tokens or p.shape.verify_width == 1 or not shape.draft_tokens)
        ]


def _clipped(error: float) -> float:
    return min(max(error, -CLIP), CLIP)


def _hold_above_narrower(candidates: Sequence[Price], prices: list[float]) -> None:
    """Of programs not trusted; one disturbed sample cannot price them out of being measured."""
    floor = narrower = 0.0
    for place, price in enumerate(candidates):
        width = price.rows_a_lane
        if price.is_trusted:
            floor, narrower = prices[place], width
        elif narrower:
            most = UNTRUSTED_SURCHARGE * floor * width / narrower
            prices[place] = min(max(prices[place], floor), most)


def _guess(program: Price, known: Sequence[Price]) -> float:
    """Relative price of a program that never ran.

    1. Between two known widths of its batch capacity: linear.
    2. Beyond them: along the line through the two nearest, or from the only one by the assumed
       share of a row; never far below the narrowest.
    3. No width of its capacity known: the nearest capacity stands for it.
    """
    capacity = program.shape.batch_capacity
    distance = min(abs(p.shape.batch_capacity - capacity) for p in known)
    near = sorted(
        (price.rows_a_lane, price.relative)
        for price in known
        if abs(price.shape.batch_capacity - capacity) == distance
    )
    width = program.rows_a_lane
    below = [entry for entry in near if entry[0] <= width]
    above = [entry for entry in near if entry[0] > width]
    if below and below[-1][0] == width:
        return below[-1][1]
    if len(near) == 1:
        nearest, cost = near[0]
        return cost * _assumed(width) / _assumed(nearest)
    pair = (below[-1:] + above[:1]) if below and above else (below[-2:] or above[:2])
    (low, low_cost), (high, high_cost) = pair[0], pair[-1]
    slope = max(high_cost - low_cost, 0.0) / max(high - low, 1.0)
    return max(low_cost + slope * (width - low), 0.1 * low_cost)


def _assumed(width: float) -> float:
    return 1.0 + ROW_SHARE * (width - 1)

"""Probes, and the account that pays for them (contract: C3).

A probe runs a program other than the best one, to learn what it costs now and how far drafts get.
It replaces no historical mean: the next ordinary choice is made from what all rounds taught.

The account is credited with a share of all time, PROBE_SHARE at most, and a probe is debited the
time that it is predicted to lose: in the long run probes lose no more. Rounds without drafts earn
the whole share, since from depth zero only probes notice that drafts have become good. Rounds with
drafts test their own depths and earn BASE_SHARE, and part of the time that drafting was measured to
save against rounds of width one. What is saved is spent evenly, because nobody knows when texts
change. A grant at the start pays the first measurements; a full account cannot grow.

At depth zero a test that goes better than forecast is repeated at once, on credit if need be: of
few lanes one round proves nothing, and the next one would be due after a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flare_ray.controller.verification.cost import CostTable, Price

PROBE_SHARE = 0.005
"""Most of all time that is ever credited."""
BASE_SHARE = 0.002
"""Share credited for a round with drafts, whether drafting gains or not."""
GAIN_SHARE = 0.05
"""Share of measured gain that is credited besides."""
MOST_GAINED = 0.0015
"""Most of a round's time that its gain adds to the account."""
START_GRANT_ROUNDS = 3.0
"""Rounds' worth of time the account starts with."""
ACCOUNT_LIMIT_ROUNDS = 4.0
"""Rounds' worth of time at which the account is full: a quiet period cannot buy a burst."""
HORIZON_ROUNDS = 100.0
"""Rounds over which what a probe finds is expected to be of use."""
SURVIVAL_DRIFT = 0.02
PRICE_DRIFT = 0.003
"""How far, relative, survival at untested depths and an unmeasured price are expected to have
moved after one round; after n rounds sqrt(n) times as far."""
_SURVIVAL_VARIANCE = SURVIVAL_DRIFT**2
_PRICE_VARIANCE = PRICE_DRIFT**2
SHIFT_CHANCE = 0.001
"""Chance per round that texts change so that drafts begin to pass; counts at depth zero."""
SAVINGS_ROUNDS = 1000.0
"""Rounds over which probes of trusted programs spend what the account holds."""
CREDIT_ROUNDS = 1.0
"""Rounds' worth of debt in which a test may be repeated that went better than forecast."""
SETTLING_PROBES = 4
"""Probes whose samples together count as what a probe can find out about a price."""
WRONG_CHANCE = 0.2
"""Chance that a price is wrong altogether, times its rounds squared: those it rests on may all have
been disturbed."""
UNKNOWN_SHARE = 0.5
"""Least share of its price that an untrusted program costs, where no trusted narrower one says
more."""
LEAST_LOSS = 0.02
"""A probe's loss is itself uncertain: at least so much of a round is weighed and debited."""


class ExplorationAccount:
    """Time that probes may lose, in nanoseconds."""

    def __init__(self) -> None:
        self.balance_ns = 0.0
        self.is_open = False

    def credit(self, cost_ns: float, *, gain_ns: float, limit_ns: float, drafted: bool) -> None:
        """Credit one round.

        Args:
            cost_ns: what it took.
            gain_ns: time it saved against making its tokens at width one; negative = it lost.
            limit_ns: what a round takes.
            drafted: the round offered drafts.
        """
        if not self.is_open:
            self.is_open = True
            self.balance_ns = START_GRANT_ROUNDS * cost_ns
        share = PROBE_SHARE
        if drafted:
            share = BASE_SHARE + min(GAIN_SHARE * max(gain_ns, 0.0) / cost_ns, MOST_GAINED)
        limit = max(ACCOUNT_LIMIT_ROUNDS * limit_ns, self.balance_ns)
        self.balance_ns = min(self.balance_ns + share * cost_ns, limit)

    def debit(self, loss_ns: float) -> None:
        """Pay a probe."""
        self.balance_ns -= loss_ns


def loss_ns(values: Sequence[float], prices: Sequence[float], place: int, best: int) -> float:
    """Time a round of `place` is predicted to lose against making its tokens with `best`."""
    return prices[place] - values[place] * prices[best] / values[best]


class Prober:
    """Picks the probe most worth its loss."""

    def __init__(self, cost: CostTable, account: ExplorationAccount) -> None:
        self._cost = cost
        self._account = account
        self._last_probe = 0

    def pick(
        self,
        candidates: Sequence[Price],
        values: Sequence[float],
        prices: Sequence[float],
        best: int,
        *,
        hint: bool = False,
    ) -> tuple[int, float]:
        """The candidate to run and its predicted loss: `best` and 0 unless a probe is due that the
        account can pay.

        Of those that promise more than they lose the one that promises most for its loss is run, or
        saved for; a full account pays for any, and what is missing stays as a debt.

        Args:
            best: place of the largest value over price.
            hint: the last tests went better than forecast.
        """
        balance_ns, price = self._account.balance_ns, prices[best]
        at_zero = not best and not candidates[0].shape.draft_tokens
        if hint and at_zero and balance_ns > -CREDIT_ROUNDS * price:
            self._last_probe = self._cost.rounds
            return _cheapest(values, prices)
        if balance_ns < LEAST_LOSS * price or not candidates[best].is_trusted:
            return best, 0.0
        untested = self._cost.rounds - self._cost.last_drafted if at_zero else 0
        chosen, lost = self._most_promising(candidates, values, prices, best, untested=untested)
        since = self._cost.rounds - self._last_probe
        due_ns = since * (PROBE_SHARE * price + balance_ns / SAVINGS_ROUNDS)
        is_early = lost > due_ns and candidates[chosen].is_trusted
        if is_early or min(lost, ACCOUNT_LIMIT_ROUNDS * price) > balance_ns or chosen == best:
            return best, 0.0
        self._last_probe = self._cost.rounds
        return chosen, lost

    def _most_promising(
        self,
        candidates: Sequence[Price],
        values: Sequence[float],
        prices: Sequence[float],
        best: int,
        *,
        untested: int,
    ) -> tuple[int, float]:
        """The probe that promises most for its loss, and that loss; `best` and 0 if none is worth
        it.

        What a probe promises is what it may find, over the rounds in which that will be of use: the
        expected improvement under what a few samples tell of both prices, and under the error of
        survival at depths untested for long. One that is not trusted promises what it would gain at
        the least it may cost, so an unmeasured width whose drafts would not survive is not saved
        for; one that is trusted promises that with the chance that its price is wrong altogether.

        Args:
            untested: rounds since drafts were offered last, at depth zero.
        """
        price, value = prices[best], values[best]
        least_ns = LEAST_LOSS * price
        chosen, worth, lost = best, 0.0, 0.0
        now, noise = self._cost.rounds, self._cost.noise * self._cost.noise
        known = noise / candidates[best].weight
        ran_wider, tested = now, max(best, 1)
        floors, slope = _floors(candidates, prices), _slope(candidates, values, tested)
        missed_ns = _missed_ns(candidates, prices, untested) if untested else 0.0
        for place in range(len(candidates) - 1, -1, -1):
            other = candidates[place]
            age = now - other.last_round
            # A wider round tests these depths too.
            if age < ran_wider:
                ran_wider = age
            if place == best:
                continue
            worthy = values[place] * price / value
            loss = max(prices[place] - worthy, least_ns)
            variance = known + noise / (other.weight or 1.0) + _PRICE_VARIANCE * age
            variance *= variance / (variance + noise / SETTLING_PROBES)
            if place > best:
                # Survival only falls: at most as many drafts pass as at the last depth tested.
                most = values[tested] + slope * (other.rows_a_lane - candidates[tested].rows_a_lane)
                if place == tested or other.is_packed or most * price > value * prices[place]:
                    variance += _SURVIVAL_VARIANCE * ran_wider
            gain = (worthy - floors[place]) / price
            if other.is_trusted:
                promised = _improvement(loss / price, variance)
                if gain > 0.0:
                    promised += gain * WRONG_CHANCE / (other.samples + 1) ** 2
            else:
                promised = _improvement(-gain, variance)
            promise = HORIZON_ROUNDS * price * promised
            if place > best:
                promise += missed_ns
            if promise > loss and promise > worth * loss:
                chosen, worth, lost = place, promise / loss, loss
        return chosen, lost


def _floors(candidates: Sequence[Price], prices: Sequence[float]) -> list[float]:
    """The least that each may cost: as the nearest trusted narrower one."""
    floors, floor = [], 0.0
    for price, cost in zip(candidates, prices, strict=True):
        floors.append(floor or UNKNOWN_SHARE * cost)
        if price.is_trusted:
            floor = cost
    return floors


def _slope(candidates: Sequence[Price], values: Sequence[float], place: int) -> float:
    """What the last row of `place` is worth, over the candidate before it."""
    rows = candidates[place].rows_a_lane - candidates[place - 1].rows_a_lane
    return (values[place] - values[place - 1]) / max(rows, 1.0)


def _cheapest(values: Sequence[float], prices: Sequence[float]) -> tuple[int, float]:
    """The wider candidate whose round loses least against the narrowest, and its loss."""
    losses = [loss_ns(values, prices, place, 0) for place in range(1, len(values))]
    least = min(losses)
    return losses.index(least) + 1, max(least, LEAST_LOSS * prices[0])


def _missed_ns(candidates: Sequence[Price], prices: Sequence[float], untested: int) -> float:
    """Time that is expected to be lost by now because nobody has looked whether drafts pass.

    They may have begun to at any of the `untested` rounds, on average half of them ago, and the
    best program then emits all its rows. Looking whenever this reaches the loss of a test makes the
    sum of what tests and delays cost least.
    """
    narrow = prices[0]
    most = max([c.rows_a_lane * narrow / ns for c, ns in zip(candidates, prices, strict=True)])
    return SHIFT_CHANCE * 0.5 * untested * untested * (most - 1.0) * narrow


def _improvement(gap: float, variance: float) -> float:
    """Expected advantage, relative, of a candidate that is `gap` worse by estimates whose error is
    normal with this variance."""
    ratio = gap / math.sqrt(2.0 * variance)
    chance = 0.5 * math.erfc(ratio)
    return math.sqrt(variance / (2.0 * math.pi)) * math.exp(-ratio * ratio) - gap * chance

"""Probes, and the account that pays for them (contract: C3).

A probe runs a program other than the best one, to learn what it costs now and how far drafts get.
It replaces no historical mean: the next ordinary choice is made from what all rounds taught.

The account is credited with BASE_SHARE of all time and with a share of the time that drafting was
measured to save against rounds of width one, both together at most PROBE_SHARE of all time; a probe
is debited the time that it is predicted to lose. So in the long run probes lose at most
PROBE_SHARE. A grant at the start pays the first measurements; a full account cannot grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flare_ray.controller.verification.cost import CostTable, Price

PROBE_SHARE = 0.005
"""Most of all time that is ever credited."""
BASE_SHARE = 0.003
"""Share credited whether drafting gains or not: without it, nobody would notice that drafts have
become good while none are offered."""
GAIN_SHARE = 0.05
"""Share of measured gain that is credited besides."""
START_GRANT_ROUNDS = 3.0
"""Rounds' worth of time the account starts with."""
ACCOUNT_LIMIT_ROUNDS = 2.0
"""Rounds' worth of time at which the account is full: a quiet period cannot buy a burst."""
HORIZON_ROUNDS = 100.0
"""Rounds over which what a probe finds is expected to be of use."""
SURVIVAL_DRIFT = 0.02
PRICE_DRIFT = 0.003
"""How far, relative, survival at untested depths and an unmeasured price are expected to have
moved after one round; after n rounds sqrt(n) times as far."""
_SURVIVAL_VARIANCE = SURVIVAL_DRIFT**2
_PRICE_VARIANCE = PRICE_DRIFT**2
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

    def credit(self, cost_ns: float, *, gain_ns: float, limit_ns: float) -> None:
        """Credit one round.

        Args:
            cost_ns: what it took.
            gain_ns: time it saved against making its tokens at width one; negative = it lost.
            limit_ns: what a round takes.
        """
        if not self.is_open:
            self.is_open = True
            self.balance_ns = START_GRANT_ROUNDS * cost_ns
        gained = min(GAIN_SHARE * max(gain_ns, 0.0), (PROBE_SHARE - BASE_SHARE) * cost_ns)
        limit = max(ACCOUNT_LIMIT_ROUNDS * limit_ns, self.balance_ns)
        self.balance_ns = min(self.balance_ns + BASE_SHARE * cost_ns + gained, limit)

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

    def pick(
        self,
        candidates: Sequence[Price],
        values: Sequence[float],
        prices: Sequence[float],
        best: int,
    ) -> tuple[int, float]:
        """The candidate to run and its predicted loss: `best` and 0 unless a probe is due that the
        account can pay.

        What a probe promises is what it may find, over the rounds in which that will be of use: the
        expected improvement under the errors of both prices, and of survival at depths untested
        for long. One that is not trusted promises what it would gain at the least it may cost, so
        an unmeasured width whose drafts would not survive is not saved for; one that is trusted
        promises that with the chance that its price is wrong altogether. Of those that promise
        more than they lose the one that promises most for its loss is run, or saved for; a full
        account pays for any, and what is missing stays as a debt.
        """
        cost, balance_ns = self._cost, self._account.balance_ns
        price, value = prices[best], values[best]
        least_ns = LEAST_LOSS * price
        if balance_ns < least_ns or not candidates[best].is_trusted:
            return best, 0.0
        chosen, worth, lost = best, 0.0, 0.0
        now, noise = cost.rounds, cost.noise * cost.noise
        known = noise / candidates[best].weight
        ran_wider = now
        floors = _floors(candidates, prices)
        for place in range(len(candidates) - 1, -1, -1):
            other = candidates[place]
            age = now - other.last_round
            # A wider round tests these depths too.
            if age < ran_wider:
                ran_wider = age
            if place == best:
                continue
            worthy = values[place] * price / value
            loss = prices[place] - worthy
            if loss < least_ns:
                loss = least_ns
            variance = known + noise / (other.weight or 1.0) + _PRICE_VARIANCE * age
            if place > best:
                variance += _SURVIVAL_VARIANCE * ran_wider
            gain = (worthy - floors[place]) / price
            if other.is_trusted:
                promised = _improvement(loss / price, variance)
                if gain > 0.0:
                    promised += gain * WRONG_CHANCE / (other.samples + 1) ** 2
            else:
                promised = _improvement(-gain, variance)
            promise = HORIZON_ROUNDS * price * promised
            if promise > loss and promise > worth * loss:
                chosen, worth, lost = place, promise / loss, loss
        if min(lost, ACCOUNT_LIMIT_ROUNDS * price) > balance_ns:
            return best, 0.0
        return chosen, lost


def _floors(candidates: Sequence[Price], prices: Sequence[float]) -> list[float]:
    """The least that each may cost: as the nearest trusted narrower one."""
    floors, floor = [], 0.0
    for price, cost in zip(candidates, prices, strict=True):
        floors.append(floor or UNKNOWN_SHARE * cost)
        if price.is_trusted:
            floor = cost
    return floors


def _improvement(gap: float, variance: float) -> float:
    """Expected advantage, relative, of a candidate that is `gap` worse by estimates whose error has
    this variance: s * phi(gap / s), an upper bound of the exact expectation."""
    if gap < 0.0:
        return 0.4 * math.sqrt(variance) - gap
    return 0.4 * math.sqrt(variance) * math.exp(-0.5 * gap * gap / variance)

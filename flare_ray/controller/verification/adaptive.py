"""The first adaptive policy: expected emitted tokens over the price of the round (contract: C2, C3,
C6).

Every round:

1. value of a width = sum over lanes of the tokens it is expected to emit, given the drafts the
   width and the lane's ceiling allow; price = what the program costs now; best = largest ratio, the
   narrower one of equals. Width one is always among the candidates.
2. A *probe* may replace it: some other width, unmeasured or not run for long, if the exploration
   account can pay the time it is predicted to lose against the best. A share of every round's time
   goes to the account, so that in the long run probes lose at most that share (C3). A start grant
   pays the first measurements.

Bound: with stationary survival and prices, goodput falls short of the best fixed width by at most
PROBE_SHARE, the start grant, and what estimates from a few dozen noisy rounds get wrong between
widths that differ by little. Simulated over 2,000 rounds (tests/support/policy_simulator.py; 114
worlds, three seeds each) with prices that vary by 10 % a round: mean 0.994 of the best fixed width,
worst run 0.957. With a neighbour that stretches spells of rounds by up to two: mean 0.983, worst
run 0.816.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification.cost import (
    SAMPLES,
    TRUSTED_SAMPLES,
    CostTable,
)
from flare_ray.controller.verification.policy import Cohort, CompletedRound, Decision
from flare_ray.controller.verification.survival import SurvivalEstimator
from flare_ray.errors import ContractViolation

PROBE_SHARE = 0.005
"""Share of all time that goes to the exploration account."""
START_GRANT_ROUNDS = 3.0
"""Rounds' worth of time the account starts with."""
ACCOUNT_LIMIT_ROUNDS = 6.0
"""Rounds' worth of time at which the account is full: a quiet period cannot buy a burst."""
STALE_ROUNDS = 100
"""Rounds after which a fully measured program may be probed again."""
STATED_BOUND = 0.06
"""Largest relative loss of goodput against the best fixed width over 2,000 simulated rounds."""


class AdaptivePolicy:
    """Chooses by value over price, and pays for its probes.

    Args:
        measured_ns: start-up measurements of programs, if any.
    """

    def __init__(self, measured_ns: Mapping[GraphShape, int] | None = None) -> None:
        self.survival = SurvivalEstimator()
        self.cost = CostTable(measured_ns)
        self._account_ns = 0.0
        self._granted = False
        self._last: Decision | None = None

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """The best program, or a probe that the account can pay."""
        candidates = _useful(cohort, catalog)
        values = self._values(cohort, candidates)
        prices = self.cost.prices_ns(candidates)
        best = 0
        for place in range(1, len(candidates)):
            if values[place] * prices[best] > values[best] * prices[place]:
                best = place
        chosen = self._probe(candidates, values, prices, best)
        if chosen != best:
            self._account_ns -= _loss_ns(values, prices, chosen, best)
        reason = "only" if len(candidates) == 1 else "best" if chosen == best else "probe"
        self._last = Decision(
            shape=candidates[chosen],
            reason=reason,  # type: ignore[arg-type]
            expected_emitted=values[chosen],
            expected_ns=prices[chosen],
            account_ns=self._account_ns,
        )
        return candidates[chosen]

    def decision(self) -> Decision:
        """The last choice; raises ContractViolation before the first."""
        if self._last is None:
            raise ContractViolation("a policy was asked to explain a choice it never made")
        return self._last

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """Update survival, price and account."""
        self.survival.observe(record.lanes)
        self.cost.observe(record.shape, max(cost_ns, 1))
        if not self._granted:
            self._granted = True
            self._account_ns = START_GRANT_ROUNDS * cost_ns
        limit_ns = ACCOUNT_LIMIT_ROUNDS * self.cost.estimate_ns(record.shape)
        self._account_ns = min(self._account_ns + PROBE_SHARE * cost_ns, limit_ns)

    def forget(self, uid: int) -> None:
        """Drop what was learnt of one request; the workload keeps it."""
        self.survival.forget(uid)

    def _values(self, cohort: Cohort, candidates: Sequence[GraphShape]) -> list[float]:
        values = [0.0] * len(candidates)
        widths = [shape.verify_width - 1 for shape in candidates]
        for lane in cohort.lanes:
            expected, ceiling = self.survival.expected_emitted(lane.uid), lane.ceiling
            for place, drafts in enumerate(widths):
                values[place] += expected[drafts if drafts < ceiling else ceiling]
        return values

    def _probe(
        self,
        candidates: Sequence[GraphShape],
        values: Sequence[float],
        prices: Sequence[float],
        best: int,
    ) -> int:
        """The candidate to run: the one most worth a probe if the account can pay it, else `best`.

        A candidate that is worth more than the affordable ones is saved for.
        """
        if not self._granted or not self.cost.is_trusted(candidates[best]):
            return best
        chosen, chosen_worth, chosen_loss_ns = best, 0.0, 0.0
        limit_ns = ACCOUNT_LIMIT_ROUNDS * prices[best]
        ran_wider = self.cost.rounds
        for place in range(len(candidates) - 1, -1, -1):
            shape = candidates[place]
            # A wider round tests these depths too.
            ran_wider = min(ran_wider, self.cost.age_rounds(shape))
            if place == best:
                continue
            age = ran_wider if place > best else self.cost.age_rounds(shape)
            need = self._need(shape, age)
            # The loss is itself uncertain: count at least a twentieth of a round.
            loss_ns = max(_loss_ns(values, prices, place, best), 0.05 * prices[best])
            if need > chosen_worth * loss_ns:
                chosen, chosen_worth, chosen_loss_ns = place, need / loss_ns, loss_ns
        # A full account pays for any probe: what is missing stays as a debt.
        return chosen if min(chosen_loss_ns, limit_ns) <= self._account_ns else best

    def _need(self, shape: GraphShape, age_rounds: int) -> float:
        """How much a round of `shape` would teach; 0 = not worth a probe now.

        Most where its price rests on a few rounds or on none, less as its window fills, and again
        with the time since it ran.
        """
        samples = self.cost.samples(shape)
        if samples < TRUSTED_SAMPLES:
            return 10.0 * (TRUSTED_SAMPLES - samples)
        missing = 1.0 - samples / SAMPLES
        stale = age_rounds / STALE_ROUNDS
        return missing + stale if missing or stale >= 1.0 else 0.0


def _useful(cohort: Cohort, catalog: Sequence[GraphShape]) -> Sequence[GraphShape]:
    """Widths up to the first that offers every lane its ceiling; wider ones only cost more."""
    most = max(lane.ceiling for lane in cohort.lanes)
    for count, shape in enumerate(catalog, start=1):
        if shape.verify_width > most:
            return catalog[:count]
    return catalog


def _loss_ns(values: Sequence[float], prices: Sequence[float], place: int, best: int) -> float:
    """Time a round of `place` is predicted to lose against making its tokens with `best`."""
    return prices[place] - values[place] * prices[best] / values[best]

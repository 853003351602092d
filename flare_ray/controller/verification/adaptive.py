"""The adaptive policy: expected emitted tokens over the price of the round (contract: C2, C3, C6).

Every round:

1. value of a program = tokens its lanes are expected to emit, given the drafts the program and each
   lane's ceiling allow, joined as the objective says; price = what it costs now; best = largest
   ratio, the narrower one of equals. Width one is always among the candidates.
   "Throughput" does not add the lanes' tokens up: a token of an easy text comes cheaply whenever
   it is made, and who hurries through easy texts is left with hard ones. Where freed slots are
   filled from one queue, the long-run rate grows with every lane's *relative* speed, so lanes are
   joined by the mean logarithm (proportional fairness). On texts that turn, 64 lanes, an oracle for
   sums reaches 0.959 of the best fixed width, one for logarithms 1.000.
   "Slo" is the same among programs at which the slowest lane is expected to keep the target time
   between tokens; if none does, the slowest lane's speed alone counts.
2. The program of the last round is kept if it is worse by no more than what a change of program was
   measured to cost, spread over SWITCH_DWELL rounds. Where a change costs nothing, nothing is kept.
3. A *probe* may replace it, if the exploration account can pay (`exploration`).
4. A choice that was made again for the same lanes stands for some rounds (HELD_ROUNDS), whose
   outcomes are learnt from together when the next one is made: between two programs nothing of the
   policy is left in the caches, and its first round there costs three times what the next ones do.

Bound: STATED_BOUND, over the worlds of tests/unit/controller/test_verification.py;
`benchmarks.policy.simulate` compares over recorded, synthetic and shifting traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from flare_ray.contracts.shapes import MAX_WIDTH, GraphShape
from flare_ray.controller.verification.capacity import ConfidenceGain, packed_expected
from flare_ray.controller.verification.cost import CostTable, Price
from flare_ray.controller.verification.exploration import ExplorationAccount, Prober, loss_ns
from flare_ray.controller.verification.policy import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    Reason,
)
from flare_ray.controller.verification.survival import SurvivalEstimator
from flare_ray.controller.verification.workload import Floats
from flare_ray.errors import ContractViolation

Objective = Literal["latency", "throughput", "slo"]

STATED_BOUND = 0.04
"""Largest relative loss of goodput against the best fixed width over 2,000 simulated rounds, on
average over noise."""
SWITCH_DECAY = 0.98
SWITCH_DWELL = 8
"""Rounds a change of program is expected to last."""
HELD_ROUNDS, HELD_IDLE_ROUNDS = 3, 8
"""Most rounds for which one choice stands, with drafts and without: a change of texts is noticed so
many rounds later at most. Without drafts nothing is learnt of them anyway."""
MISSED_SHARE = 0.01
"""What a program that misses the target counts beside one that keeps it: less than any speed could
make up for."""


class _Last(NamedTuple):
    """The last choice: its reason, place among the candidates, predicted loss as a probe, and what
    it was made from."""

    reason: Reason
    place: int
    lost: float
    candidates: Sequence[Price]
    values: list[float]
    prices: list[float]
    expected: Floats
    paces: tuple[float, ...]


class AdaptivePolicy:
    """Chooses by value over price, and pays for its probes.

    Args:
        measured_ns: start-up measurements of programs, if any.
        objective: "throughput" joins lanes by the mean logarithm of their tokens, "latency" by the
            mean time per token, "slo" as throughput under a target.
        inter_token_ns: that target; needed under "slo" alone.
    """

    def __init__(
        self,
        measured_ns: Mapping[GraphShape, int] | None = None,
        *,
        objective: Objective = "throughput",
        inter_token_ns: float = 0.0,
    ) -> None:
        self.survival = SurvivalEstimator()
        self.cost = CostTable(measured_ns)
        self.confidence = ConfidenceGain()
        self.account = ExplorationAccount()
        self._objective = objective
        self._target_ns = inter_token_ns
        self._prober = Prober(self.cost, self.account)
        self._switching = _SwitchCost()
        self._narrowest: Price | None = None
        self._previous: Price | None = None
        self._last: _Last | None = None
        self._known_programs: dict[int, tuple[Sequence[GraphShape], list[Price]]] = {}
        self._held = _Held()
        self._unlearnt: list[tuple[CompletedRound, int]] = []
        self._told: Decision | None = None

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """The best program, or a probe that the account can pay."""
        shape = self._held.standing(cohort, catalog)
        if shape is None:
            self.learn()
            shape = self._chosen(cohort, catalog)
            self._told = None
            assert self._last is not None
            self._held.start(shape, cohort, catalog, is_probe=self._last.reason == "probe")
        return shape

    def _chosen(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        programs = self._programs(catalog)
        useful = _useful(cohort, catalog)
        candidates = programs if useful == len(programs) else programs[:useful]
        expected = self.survival.expected_of(cohort.lanes)
        prices = self.cost.prices_ns(self._priced(cohort.lanes, candidates))
        values = self._values(expected, candidates)
        paces: tuple[float, ...] = ()
        if self._target_ns:
            slowest = self._slowest(expected, candidates)
            paces = tuple([ns / tokens for ns, tokens in zip(prices, slowest, strict=True)])
            values = self._held_to_target(slowest, values, prices)
        best = 0
        value, price = values[0], prices[0]
        for place in range(1, len(candidates)):
            if values[place] * price > value * prices[place]:
                best, value, price = place, values[place], prices[place]
        reason: Reason = "best"
        lost = 0.0
        if len(candidates) == 1:
            reason = "only"
        else:
            kept = self._keep(candidates, values, prices, best)
            if kept != best:
                best, reason = kept, "kept"
            chosen, lost = self._prober.pick(
                candidates, values, prices, best, hint=self.survival.hints_at_better
            )
            if chosen != best:
                best, reason = chosen, "probe"
                self.account.debit(lost)
        self._narrowest = candidates[0]
        self._last = _Last(reason, best, lost, candidates, values, prices, expected, paces)
        return candidates[best].shape

    def decision(self) -> Decision:
        """The last choice; raises ContractViolation before the first."""
        if self._last is None:
            raise ContractViolation("a policy was asked to explain a choice it never made")
        if self._told is None:
            self._told = self._explained(self._last)
        return self._told

    def _explained(self, last: _Last) -> Decision:
        reason, place, lost, candidates, values, prices, expected, paces = last
        top = max(range(len(values)), key=lambda other: values[other] / prices[other])
        return Decision(
            shape=candidates[place].shape,
            reason=reason,
            expected_emitted=float(self._lane_tokens(expected, candidates[place].shape).sum()),
            expected_ns=prices[place],
            account_ns=self.account.balance_ns,
            probe_ns=lost,
            regret_ns=max(loss_ns(values, prices, place, top), 0.0),
            inter_token_ns=paces,
            candidates=tuple([price.shape for price in candidates]),
            values=tuple(values),
            prices_ns=tuple(prices),
        )

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """Keep the round for the next choice to learn from."""
        self._unlearnt.append((record, cost_ns))
        if len(self._unlearnt) > HELD_IDLE_ROUNDS:
            self.learn()

    def learn(self) -> None:
        """Learn from the rounds since the last choice: survival, and from rounds of usual time
        prices and account."""
        rounds, self._unlearnt = self._unlearnt, []
        if len(rounds) > 1 and not any(r.sources or r.shape.packed_capacity for r, _ in rounds):
            self.survival.observe_together([record.lanes for record, _ in rounds])
            for record, cost_ns in rounds:
                self._learn_cost(record, cost_ns)
            return
        for record, cost_ns in rounds:
            if record.shape.packed_capacity and record.is_usual:
                self._learn_confidence(record)
            self.survival.observe(record.lanes, record.sources)
            self._learn_cost(record, cost_ns)

    def _learn_cost(self, record: CompletedRound, cost_ns: int) -> None:
        if not record.is_usual:
            return
        cost_ns = max(cost_ns, 1)
        shape = _without_drafter(record.shape) if record.copies_alone else record.shape
        program = self.cost.price(shape)
        estimate_ns = self.cost.price_ns(program)
        self._switching.observe(cost_ns / estimate_ns - 1.0, switched=program is not self._previous)
        self._previous = program
        self.cost.observe(shape, cost_ns)
        gain_ns = 0.0
        if self._narrowest is not None and program is not self._narrowest:
            emitted = [lane.emitted for lane in record.lanes]
            alive = len(emitted) - emitted.count(0)
            if alive:
                narrow_ns = self.cost.price_ns(self._narrowest)
                gain_ns = sum(emitted) / alive * narrow_ns - cost_ns
        drafted = shape.draft_tokens > 0
        self.account.credit(cost_ns, gain_ns=gain_ns, limit_ns=estimate_ns, drafted=drafted)

    def expected_rate(self, lane: CohortLane) -> float:
        """At the widths of the last choice, by what was known then, since nothing else may decide
        when rounds are learnt from; an unknown request counts as the workload does. Among others a
        copying lane saves no drafter, so tokens alone decide there."""
        expected = self.survival.expected_by_drafts(lane)
        if self._last is None:
            return expected[-1]
        candidates = self._last.candidates
        if len(self._last.expected) == 1:
            candidates = self._priced((lane,), candidates)
        prices = self.cost.prices_ns(candidates)
        return max(
            expected[min(price.shape.verify_width - 1, lane.ceiling)] / cost_ns
            for price, cost_ns in zip(candidates, prices, strict=True)
        )

    def compared(self, uid: int, source: int, *, passed: int, failed: bool) -> None:
        """Update the source's survival."""
        self.learn()
        self.survival.compared(uid, source, passed=passed, failed=failed)

    def _learn_confidence(self, record: CompletedRound) -> None:
        """Compare a packed round with what survival expected of its living lanes."""
        alive = [lane for lane in record.lanes if lane.emitted]
        if alive:
            lanes = tuple(CohortLane(lane.uid, record.shape.draft_tokens) for lane in alive)
            expected = packed_expected(self.survival.expected_of(lanes), record.shape)
            emitted = sum(lane.emitted - 1 for lane in alive)
            drafted = float(expected.sum()) - len(alive)
            self.confidence.observe(record.shape, drafted=drafted, emitted=emitted)

    def forget(self, uid: int) -> None:
        """Drop what was learnt of one request; the workload keeps it."""
        self.learn()
        self.survival.forget(uid)

    def _priced(self, lanes: Sequence[CohortLane], candidates: Sequence[Price]) -> Sequence[Price]:
        """What candidates cost in a round of these lanes: where all drafts are copies, without the
        drafter, once enough rounds have shown it. Nobody measures that at start-up, and its first
        rounds are slow ones, being recorded."""
        if not any(lane.sources for lane in lanes):
            return candidates
        short = [len(lane.sources) for lane in lanes if len(lane.sources) < lane.ceiling]
        deepest = min(short, default=MAX_WIDTH)
        priced = []
        for price in candidates:
            width = price.shape.verify_width
            if 1 < width <= deepest + 1 and not price.shape.packed_capacity:
                alone = self.cost.price(_without_drafter(price.shape))
                price = alone if alone.is_trusted else price
            priced.append(price)
        return priced

    def _programs(self, catalog: Sequence[GraphShape]) -> list[Price]:
        """What is known of a catalog's programs, looked up once per catalog."""
        capacity = catalog[0].batch_capacity
        known = self._known_programs.get(capacity)
        if known is None or (known[0] is not catalog and known[0] != catalog):
            known = (catalog, [self.cost.price(shape) for shape in catalog])
            self._known_programs[capacity] = known
        return known[1]

    def _values(self, expected: Floats, candidates: Sequence[Price]) -> list[float]:
        joined = self._joined(expected)
        return [
            self._joined(self._packed(expected, price.shape)[:, None])[0]
            if price.shape.packed_capacity
            else joined[price.shape.verify_width - 1]
            for price in candidates
        ]

    def _joined(self, tokens: Floats) -> list[float]:
        """Lanes joined as the objective says, for every column of [lanes, n]."""
        lanes = len(tokens)
        if lanes == 1:
            joined = tokens[0]
        elif self._objective == "latency":
            joined = lanes * lanes / (1.0 / tokens).sum(0)
        else:
            joined = lanes * np.exp(np.add.reduce(np.log(tokens), 0) / lanes)
        found: list[float] = joined.tolist()
        return found

    def _packed(self, expected: Floats, shape: GraphShape) -> Floats:
        """[lanes]: what each emits in a packed round, what confidence gains included."""
        drafted = packed_expected(expected, shape) - 1.0
        tokens: Floats = 1.0 + np.minimum(
            drafted * self.confidence.of(shape), expected[:, shape.draft_tokens] - 1.0
        )
        return tokens

    def _lane_tokens(self, expected: Floats, shape: GraphShape) -> Floats:
        if shape.packed_capacity:
            return self._packed(expected, shape)
        tokens: Floats = expected[:, shape.verify_width - 1]
        return tokens

    def _held_to_target(
        self, slowest: Sequence[float], values: Sequence[float], prices: Sequence[float]
    ) -> list[float]:
        """Values under "slo": the slowest lane's tokens where a program misses the target, made
        negligible if another one keeps it."""
        kept = [ns <= self._target_ns * n for ns, n in zip(prices, slowest, strict=True)]
        share = MISSED_SHARE if any(kept) else 1.0
        return [
            value if keeps else share * own
            for value, own, keeps in zip(values, slowest, kept, strict=True)
        ]

    def _slowest(self, expected: Floats, candidates: Sequence[Price]) -> list[float]:
        """Expected tokens of the slowest lane, by candidate."""
        return [float(self._lane_tokens(expected, price.shape).min()) for price in candidates]

    def _keep(
        self,
        candidates: Sequence[Price],
        values: Sequence[float],
        prices: Sequence[float],
        best: int,
    ) -> int:
        """The last round's program if the best one is not enough better, else `best`."""
        margin = self._switching.margin
        if margin <= 0.0 or candidates[best] is self._previous:
            return best
        for place, program in enumerate(candidates):
            if program is self._previous:
                gain = values[best] * prices[place] / (values[place] * prices[best])
                return place if gain < 1.0 + margin else best
        return best


class _Held:
    """The last choice while it stands."""

    def __init__(self) -> None:
        self._shape: GraphShape | None = None
        self._lanes: tuple[CohortLane, ...] = ()
        self._catalog: Sequence[GraphShape] = ()
        self._repeats = 0
        self._left = 0

    def standing(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape | None:
        """The choice, if it still stands for these lanes: the same requests with the same ceilings
        and nothing to copy."""
        known = catalog is self._catalog or catalog == self._catalog
        if self._left and known and cohort.lanes == self._lanes:
            self._left -= 1
            return self._shape
        self._left = 0
        return None

    def start(
        self,
        shape: GraphShape,
        cohort: Cohort,
        catalog: Sequence[GraphShape],
        *,
        is_probe: bool,
    ) -> None:
        """A choice was made. Made again, it stands for one round more each time."""
        same = shape is self._shape and cohort.lanes == self._lanes and not is_probe
        self._repeats = self._repeats + 1 if same else 0
        most = HELD_ROUNDS if shape.draft_tokens else HELD_IDLE_ROUNDS
        copying = any(lane.sources for lane in cohort.lanes)
        self._left = 0 if copying or is_probe else min(self._repeats, most - 1)
        self._shape, self._lanes, self._catalog = shape, cohort.lanes, catalog


class _SwitchCost:
    """What the first round of another program costs beyond its price, relative."""

    def __init__(self) -> None:
        self._excess = 0.0
        self._square = 0.0
        self._weight = 0.0
        self._usual = 0.0

    def observe(self, error: float, *, switched: bool) -> None:
        """One round's cost over its price, less one."""
        error = min(max(error, -0.5), 0.5)
        if not switched:
            self._usual += (error - self._usual) * (1.0 - SWITCH_DECAY)
            return
        excess = error - self._usual
        self._excess = self._excess * SWITCH_DECAY + excess
        self._square = self._square * SWITCH_DECAY + excess * excess
        self._weight = self._weight * SWITCH_DECAY + 1.0

    @property
    def margin(self) -> float:
        """Advantage that a change must promise: its certain cost (two standard errors off), spread
        over the rounds it lasts; 0 where no cost is certain."""
        if self._weight < 8.0:
            return 0.0
        mean = self._excess / self._weight
        if mean <= 0.0:
            return 0.0
        variance = max(self._square / self._weight - mean * mean, 0.0)
        certain = mean - 2.0 * float((variance / self._weight) ** 0.5)
        return max(certain, 0.0) / SWITCH_DWELL


def _useful(cohort: Cohort, catalog: Sequence[GraphShape]) -> int:
    """How many programs are of use: those up to the first width that offers every lane its ceiling;
    wider ones only cost more."""
    most = max([lane.ceiling for lane in cohort.lanes])
    if catalog[-1].verify_width > most:
        for count, shape in enumerate(catalog, start=1):
            if shape.verify_width > most and not shape.packed_capacity:
                return count
    return len(catalog)


def _without_drafter(shape: GraphShape) -> GraphShape:
    """The same rows with nothing proposed: what a round of copies alone is priced as."""
    return msgspec.structs.replace(shape, draft_tokens=0)

"""How many drafts survive: joint prefix survival by depth and source, per request (contract: C2).

survival[i] is the chance that the first i drafts are all accepted: a product of conditional chances
h[1] .. h[i], h[j] = chance that depth j is accepted given that depths 1 .. j-1 were, each estimated
from the rounds that *tested* depth j (the product-limit estimator of Kaplan and Meier 1958). A
depth that was not offered, lay behind the first rejection, or was cut by EOS or budget was not
tested: it counts neither way. Choosing a width by past outcomes does not bias it, since a round is
censored before its own outcome.

Each estimate is shrunk to the next coarser one:

    request h[d]  ->  workload h[d] shifted by the request's odds  ->  workload h[d]
                  ->  workload h[d-1]  ->  FIRST_DEPTH_PRIOR

The shift is one number per request: how much better or worse than the workload it did over all
depths it was tested at. A request that turns out easy at depth one is thereby expected to be easy
at depth five, which no test of its own could tell so soon.

Memories are long, so that estimates are quiet; when recent outcomes contradict one by more than
chance explains, most of it is dropped at once. That follows a text that turns from prose to copying
within some ten rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flare_ray.contracts.record import FAULTS, LaneRecord, Status
from flare_ray.contracts.shapes import MAX_WIDTH
from flare_ray.controller.verification.policy import CohortLane, ProposalSource
from flare_ray.controller.verification.workload import (
    KEPT_AFTER_CHANGE,
    MAX_DRAFTS,
    RECENT_DECAY,
    SURPRISE,
    Floats,
    Spread,
    Workload,
)

REQUEST_STRENGTH = 8.0
"""Tests that weigh as much as the prior an estimate is shrunk to."""
REQUEST_DECAY = 0.97
"""Weight of the past at each round that tested something: a memory of 33 rounds."""
IDLE_DECAY = 0.985
"""Weight of a request's memory after a round that offered nothing: about 45 rounds half its
evidence, so that a request once found hopeless is judged by the workload again."""
_INITIAL_ROWS = 16
FEW_LANES = 4
"""Largest round that is learnt from without arrays, whose operators cost a microsecond each."""

Outcome = tuple[int, int, int]
"""A request's round: its row, drafts that passed, 1 if the next one failed."""
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_FATE = int(Status.ACTIVE | FAULTS)
_LIVED = int(Status.ACTIVE)
_DEPTHS: Ints = np.arange(MAX_DRAFTS)


class _Evidence:
    """What the tests of one request say so far; attributes as the columns of `_SourceTable`."""

    __slots__ = ("passed", "surprise", "tested", "variance")

    def __init__(
        self, tested: list[float], passed: list[float], surprise: float, variance: float
    ) -> None:
        self.tested, self.passed = tested, passed
        self.surprise, self.variance = surprise, variance

    def add(self, successes: int, failed: int, surprise: float, variance: float) -> None:
        """One more round: its outcome, how far that was from the forecast, the forecast's own
        variance."""
        self.surprise = self.surprise * RECENT_DECAY + surprise
        self.variance = self.variance * RECENT_DECAY + variance
        keep, until = REQUEST_DECAY, successes + failed
        if self.surprise * self.surprise > SURPRISE * self.variance + 1.0:
            keep, until = KEPT_AFTER_CHANGE, MAX_DRAFTS
            self.surprise = self.variance = 0.0
        tested, passed = self.tested, self.passed
        for depth in range(until):
            tested[depth] = tested[depth] * keep + (depth < successes + failed)
            passed[depth] = passed[depth] * keep + (depth < successes)


class _SourceTable:
    """Tests of one proposal source, a row per request.

    Attributes:
        chances: [rows, 7], conditional chance by depth as of the row's last round.
        expected: [rows, 8], entry k = tokens a round with k offered drafts emits.
    """

    def __init__(self, rows: int) -> None:
        self.workload = Workload()
        self._spread = Spread()
        self._tested = np.zeros((rows, MAX_DRAFTS))
        self._passed = np.zeros((rows, MAX_DRAFTS))
        self._surprise = np.zeros(rows)
        self._variance = np.zeros(rows)
        self.chances = np.zeros((rows, MAX_DRAFTS))
        self.expected = np.ones((rows, MAX_WIDTH))

    def grow(self, rows: int) -> None:
        """Make room for `rows` requests; present rows keep their place."""
        more = rows - len(self._tested)
        wide = ((0, more), (0, 0))
        self._tested = np.pad(self._tested, wide)
        self._passed = np.pad(self._passed, wide)
        self._surprise = np.pad(self._surprise, (0, more))
        self._variance = np.pad(self._variance, (0, more))
        self.chances = np.pad(self.chances, wide)
        self.expected = np.pad(self.expected, wide, constant_values=1.0)

    def open(self, row: int) -> None:
        """A new request: the workload's chances."""
        self._tested[row] = self._passed[row] = 0.0
        self._surprise[row] = self._variance[row] = 0.0
        chances = self.workload.chances
        self.chances[row] = chances
        self.expected[row, 1:] = 1.0 + np.cumsum(np.cumprod(chances))

    def observe(self, rows: Ints, tested: Bools, passed: Bools) -> None:
        """Add one round's tests of these requests, [rows, 7] each.

        Only tested depths lose weight, so that a deep one seldom tested is remembered longer.
        """
        forecast = self.chances[rows]
        surprise = ((passed - forecast) * tested).sum(1)
        variance = (forecast * (1.0 - forecast) * tested).sum(1)
        self.workload.observe(
            tested.sum(0).tolist(),
            passed.sum(0).tolist(),
            float(surprise.sum()),
            float(variance.sum()),
        )
        surprise += self._surprise[rows] * RECENT_DECAY
        variance += self._variance[rows] * RECENT_DECAY
        changed = surprise**2 > SURPRISE * variance + 1.0
        keep = np.where(tested, REQUEST_DECAY, 1.0)
        if changed.any():
            keep[changed] = KEPT_AFTER_CHANGE
            surprise[changed] = variance[changed] = 0.0
        self._surprise[rows], self._variance[rows] = surprise, variance
        self._store(rows, self._tested[rows] * keep + tested, self._passed[rows] * keep + passed)

    def observe_few(self, rounds: Sequence[Sequence[Outcome]]) -> None:
        """As `observe`, of rounds in their order that all know the chances of the first one; for so
        few requests that arrays would cost more than they save."""
        forecasts: dict[int, list[float]] = {}
        evidence: dict[int, _Evidence] = {}
        for outcomes in rounds:
            tested, passed = [0] * MAX_DRAFTS, [0] * MAX_DRAFTS
            surprises = variances = 0.0
            for row, successes, failed in outcomes:
                chances = forecasts.get(row)
                if chances is None:
                    chances = forecasts[row] = self.chances[row].tolist()
                    evidence[row] = _Evidence(
                        self._tested[row].tolist(),
                        self._passed[row].tolist(),
                        float(self._surprise[row]),
                        float(self._variance[row]),
                    )
                surprise = variance = 0.0
                for depth in range(successes + failed):
                    chance = chances[depth]
                    tested[depth] += 1
                    passed[depth] += depth < successes
                    surprise += (depth < successes) - chance
                    variance += chance * (1.0 - chance)
                surprises += surprise
                variances += variance
                evidence[row].add(successes, failed, surprise, variance)
            self.workload.observe(tested, passed, surprises, variances)
        for row, own in evidence.items():
            self._surprise[row], self._variance[row] = own.surprise, own.variance
        self._store_few([(row, o.tested, o.passed) for row, o in evidence.items()], len(rounds))

    def fade_few(self, rows: Sequence[int], rounds: int) -> None:
        """As `fade` so many times, for few requests."""
        self.workload.quiet(rounds)
        kept = IDLE_DECAY**rounds
        self._store_few(
            [
                (row, (self._tested[row] * kept).tolist(), (self._passed[row] * kept).tolist())
                for row in rows
            ],
            rounds,
        )

    def _store_few(self, rows: Sequence[tuple[int, list[float], list[float]]], rounds: int) -> None:
        prior = self.workload.chances.tolist()
        sums = []
        for _, tested, passed in rows:
            forecast = variance = 0.0
            for count, chance in zip(tested, prior, strict=True):
                likely = count * chance
                forecast += likely
                variance += likely * (1.0 - chance)
            sums.append((sum(tested), sum(passed), forecast, variance))
        told = [(passes - forecast, v) for _, passes, forecast, v in sums]
        self._spread.observe_few(told, rounds)
        half = self._spread.strength / 2
        for (row, tested, passed), (total, passes, forecast, _) in zip(rows, sums, strict=True):
            shift = (passes + half) * (total - forecast + half)
            shift /= (total - passes + half) * (forecast + half)
            chances, expected = [], []
            previous = survival = emitted = 1.0
            for usual, tests, own in zip(prior, tested, passed, strict=True):
                shifted = shift * usual
                shifted /= 1.0 - usual + shifted
                strength = tests + REQUEST_STRENGTH
                weight = REQUEST_STRENGTH / strength
                chance = own / strength + weight * shifted
                if shifted > previous:
                    chance -= (shifted - previous) * weight / 2
                survival *= chance
                emitted += survival
                previous = chance
                chances.append(chance)
                expected.append(emitted)
            self._tested[row], self._passed[row] = tested, passed
            self.chances[row] = chances
            self.expected[row, 1:] = expected

    def fade(self, rows: Ints) -> None:
        """Requests that offered nothing remember a little less."""
        self.workload.quiet()
        self._store(rows, self._tested[rows] * IDLE_DECAY, self._passed[rows] * IDLE_DECAY)

    def _store(self, rows: Ints, tested: Floats, passed: Floats) -> None:
        self._tested[rows], self._passed[rows] = tested, passed
        prior = self.workload.chances
        # The odds of a pass, observed over forecast, both with so many even tests added.
        total, passes = tested.sum(1), passed.sum(1)
        forecast = tested @ prior
        self._spread.observe(passes - forecast, tested @ (prior * (1.0 - prior)))
        half = self._spread.strength / 2
        shift = (passes + half) * (total - forecast + half)
        shift /= (total - passes + half) * (forecast + half)
        shifted = shift[:, None] * prior
        shifted /= 1.0 - prior + shifted
        weight = REQUEST_STRENGTH / (tested + REQUEST_STRENGTH)
        chances = passed / (tested + REQUEST_STRENGTH) + weight * shifted
        for depth in range(1, MAX_DRAFTS):
            # Over all requests a deep chance is high because only easy ones get there: one that is
            # above the request's own chance a depth before counts half.
            excess = shifted[:, depth] - chances[:, depth - 1]
            chances[:, depth] -= np.maximum(excess, 0.0) * weight[:, depth] / 2
        self.chances[rows] = chances
        self.expected[rows, 1:] = 1.0 + chances.cumprod(1).cumsum(1)


class SurvivalEstimator:
    """Survival of every live request, and of the workload."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free = list(range(_INITIAL_ROWS - 1, -1, -1))
        self._rows = _INITIAL_ROWS
        self._learned = _SourceTable(self._rows)
        self._copied: dict[int, _SourceTable] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def hints_at_better(self) -> bool:
        """Whether the last drafts passed so much more often than forecast that more should be
        tested."""
        return self._learned.workload.hints_at_better

    def expected_emitted(self, uid: int) -> tuple[float, ...]:
        """Entry k: 1 + survival[1] + .. + survival[k] of learned drafts, for k = 0 .. 7."""
        return tuple(self._learned.expected[self._row(uid)].tolist())

    def expected_of(self, lanes: Sequence[CohortLane]) -> Floats:
        """[lanes, 8]: `expected_emitted` of every lane with its own sources, ceilings applied."""
        get = self._row_of.get
        rows = [get(lane.uid, -1) for lane in lanes]
        if -1 in rows:
            rows = [self._row(lane.uid) for lane in lanes]
        expected: Floats = self._learned.expected.take(rows, 0)
        sources = [lane.sources for lane in lanes]
        if any(sources):
            for place, listed in enumerate(sources):
                if listed:
                    expected[place] = self._mixed(rows[place], listed)
        ceilings = [lane.ceiling for lane in lanes]
        if min(ceilings) < MAX_DRAFTS:
            for place, ceiling in enumerate(ceilings):
                if ceiling < MAX_DRAFTS:
                    expected[place, ceiling + 1 :] = expected[place, ceiling]
        return expected

    def expected_by_drafts(self, lane: CohortLane) -> list[float]:
        """As `expected_of` of one lane, for 0 .. ceiling drafts; begins no record of it."""
        row = self._row_of.get(lane.uid)
        total = survival = 1.0
        expected = [total]
        for depth in range(min(lane.ceiling, MAX_DRAFTS)):
            source = lane.sources[depth] if depth < len(lane.sources) else ProposalSource.LEARNED
            table = self._table(source)
            chances = table.workload.chances if row is None else table.chances[row]
            survival *= float(chances[depth])
            total += survival
            expected.append(total)
        return expected

    def compared(self, uid: int, source: int, *, passed: int, failed: bool) -> None:
        """Learn from a copy that was not offered: its first depths, as the text told them."""
        self._table(source).observe_few([[(self._row(uid), passed, int(failed))]])

    def observe(self, lanes: Sequence[LaneRecord], sources: Sequence[tuple[int, ...]] = ()) -> None:
        """Learn from one round's records; dead and failed lanes teach nothing.

        Args:
            sources: per lane the `ProposalSource` of its depths; () = all LEARNED.
        """
        lives = [lane.status & _FATE == _LIVED for lane in lanes]
        told, listed = lanes, sources
        if not all(lives):
            told = list(itertools.compress(lanes, lives))
            listed = list(itertools.compress(sources, lives))
        if not told:
            return
        if len(told) <= FEW_LANES and not any(listed):
            self._observe_few([told])
            return
        get = self._row_of.get
        found = [get(lane.uid, -1) for lane in told]
        rows = np.array([self._row(lane.uid) for lane in told] if -1 in found else found)
        offered = np.array([lane.offered for lane in told])
        if not offered.any():
            self._learned.fade(rows)
            return
        accepted = np.array([lane.accepted for lane in told])
        emitted = np.array([lane.emitted for lane in told])
        # In a clipped round the committed drafts passed; the next one's fate is not told.
        successes = np.minimum(accepted, emitted)
        failed = (accepted < offered) & (emitted > accepted)
        passed = successes[:, None] > _DEPTHS
        tested = (successes + failed)[:, None] > _DEPTHS
        if any(listed):
            self._observe_mixed(rows, tested, passed, listed)
        elif offered.all():
            self._learned.observe(rows, tested, passed)
        else:
            some = offered > 0
            self._learned.observe(rows[some], tested[some], passed[some])
            self._learned.fade(rows[~some])

    def observe_together(self, rounds: Sequence[Sequence[LaneRecord]]) -> None:
        """As `observe` of each, without copies, which were all planned from one choice."""
        few = all(len(lanes) <= FEW_LANES for lanes in rounds)
        if few and all(lane.status & _FATE == _LIVED for lanes in rounds for lane in lanes):
            self._observe_few(rounds)
            return
        for lanes in rounds:
            self.observe(lanes)

    def _observe_few(self, rounds: Sequence[Sequence[LaneRecord]]) -> None:
        """Rounds of few living lanes: those that tested something, then who offered nothing."""
        learnt: list[list[Outcome]] = []
        idle: dict[int, int] = {}
        for lanes in rounds:
            outcomes = []
            for lane in lanes:
                if not lane.offered:
                    idle[lane.uid] = idle.get(lane.uid, 0) + 1
                    continue
                failed = lane.accepted < lane.offered and lane.emitted > lane.accepted
                passed = min(lane.accepted, lane.emitted)
                outcomes.append((self._row(lane.uid), passed, int(failed)))
            if outcomes:
                learnt.append(outcomes)
        if learnt:
            self._learned.observe_few(learnt)
        for times in sorted(set(idle.values())):
            rows = [self._row(uid) for uid, count in idle.items() if count == times]
            self._learned.fade_few(rows, times)

    def forget(self, uid: int) -> None:
        """Drop a request."""
        row = self._row_of.pop(uid, None)
        if row is not None:
            self._free.append(row)

    def _row(self, uid: int) -> int:
        row = self._row_of.get(uid)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[uid] = self._free.pop()
            for table in (self._learned, *self._copied.values()):
                table.open(row)
        return row

    def _grow(self) -> None:
        self._free = list(range(2 * self._rows - 1, self._rows - 1, -1))
        self._rows *= 2
        for table in (self._learned, *self._copied.values()):
            table.grow(self._rows)

    def _table(self, source: int) -> _SourceTable:
        if source == ProposalSource.LEARNED:
            return self._learned
        table = self._copied.get(source)
        if table is None:
            table = self._copied[source] = _SourceTable(self._rows)
            for row in self._row_of.values():
                table.open(row)
        return table

    def _mixed(self, row: int, sources: tuple[int, ...]) -> list[float]:
        """Expected tokens where depths come from several sources."""
        learned = self._learned.chances[row].tolist()
        total = survival = 1.0
        expected = [total]
        for depth in range(MAX_DRAFTS):
            source = sources[depth] if depth < len(sources) else ProposalSource.LEARNED
            chance = learned[depth]
            if source != ProposalSource.LEARNED:
                chance = float(self._table(source).chances[row, depth])
            survival *= chance
            total += survival
            expected.append(total)
        return expected

    def _observe_mixed(
        self, rows: Ints, tested: Bools, passed: Bools, sources: Sequence[tuple[int, ...]]
    ) -> None:
        """Give every table the depths of its source; each stays conditional on those before it."""
        kinds = np.zeros(tested.shape, dtype=np.int64)
        for place, listed in enumerate(sources):
            kinds[place, : len(listed)] = listed
        for source in np.unique(kinds).tolist():
            own = tested & (kinds == source)
            some = own.any(1)
            if some.any():
                self._table(source).observe(rows[some], own[some], (passed & own)[some])
        idle = ~tested.any(1)
        if idle.any():
            self._learned.fade(rows[idle])

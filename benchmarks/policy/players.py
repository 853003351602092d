"""Plays policies through a trace and a cost table.

Every player meets the same text, luck and noise. A round counts the tokens its lanes were expected
to emit and the price of its program without noise: what is compared are decisions, not draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.policy.costs import CostTable, catalog
from benchmarks.policy.traces import DEPTHS, Floats, Trace
from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.contracts.shapes import MAX_WIDTH, GraphShape
from flare_ray.controller.verification import (
    Cohort,
    CohortLane,
    CompletedRound,
    VerificationPolicy,
)

NOISE = 0.06
DISTURBED_SHARE = 0.01
DISTURBANCE = 3.0
DRIFT = 0.3
"""A round's observed cost: 6 % of noise, one in a hundred three times as long, and a level that
rises by 30 % over the run, as contexts grow."""

Ints = NDArray[np.int64]


@dataclass
class Stage:
    """A trace on so many lanes, for so many rounds; holds what players share.

    Attributes:
        first: the trace's lane that is this stage's first.
        classes / requests: [lanes * L], flat.
        accepted: for each turn's offset, [lanes * L] drafts accepted if all are offered.
        start: [lanes], flat index of each lane's first position.
    """

    trace: Trace
    lanes: int
    rounds: int
    first: int = 0
    classes: Ints = field(init=False)
    requests: Ints = field(init=False)
    accepted: dict[int, Ints] = field(init=False)
    start: Ints = field(init=False)
    expected: Floats = field(init=False)

    def __post_init__(self) -> None:
        trace, lanes = self.trace, self.lanes
        own = slice(self.first, self.first + lanes)
        self.classes = trace.classes[own].ravel().astype(np.int64)
        self.requests = trace.requests[own].ravel().astype(np.int64)
        self.accepted = {
            offset: trace.drawn(offset)[own].ravel().astype(np.int64) for _, offset in trace.turns
        }
        self.start = np.arange(lanes, dtype=np.int64) * trace.classes.shape[1]
        self.expected = trace.expected

    def phases(self) -> list[tuple[int, int]]:
        """(phase, class offset) of every round."""
        phases: list[tuple[int, int]] = []
        ends = [begin for begin, _ in self.trace.turns[1:]] + [self.rounds]
        for phase, ((begin, offset), end) in enumerate(zip(self.trace.turns, ends, strict=True)):
            phases += [(phase, offset)] * (min(end, self.rounds) - begin)
        return phases


@dataclass
class Run:
    """What a player achieved.

    Attributes:
        emitted / price_ns: expected tokens and time by phase of the workload.
        widths: of every round.
        probe_ns: time lost to probes by the policy's own account.
    """

    emitted: Floats
    price_ns: Floats
    widths: list[int] = field(default_factory=list)
    probe_ns: float = 0.0

    @property
    def goodput(self) -> float:
        """Expected tokens a nanosecond. Every phase counts as the same time, as workloads turn by
        the clock: in rounds, whoever runs long rounds in good times would be favoured."""
        return float((self.emitted / self.price_ns).mean())


Chooser = Callable[[int, Ints], int]
"""(round, class of every lane) -> drafts."""
Learner = Callable[[int, Ints], None]
"""(drafts offered, drafts accepted by every lane)."""


def play_fixed(stage: Stage) -> Floats:
    """[8]: mean expected tokens of a round at each fixed draft count, every phase counting alike;
    every count on its own path."""
    drafts = np.arange(MAX_WIDTH)[:, None]
    place = np.repeat(stage.start[None], MAX_WIDTH, 0)
    flat = stage.expected.ravel()
    emitted = np.zeros((len(stage.trace.turns), MAX_WIDTH))
    phases = stage.phases()
    for phase, offset in phases:
        classes = stage.classes.take(place)
        emitted[phase] += flat.take((classes + offset) * MAX_WIDTH + drafts).sum(1)
        place += np.minimum(stage.accepted[offset].take(place), drafts) + 1
    rounds = np.bincount([phase for phase, _ in phases])
    mean: Floats = (emitted / rounds[:, None]).mean(0)
    return mean


def play(stage: Stage, prices: Floats, choose: Chooser, learn: Learner | None = None) -> Run:
    """A player that sees classes (an oracle) or outcomes (a public policy)."""
    place = stage.start.copy()
    run = _empty(stage)
    for number, (phase, offset) in enumerate(stage.phases()):
        classes = stage.classes.take(place) + offset
        drafts = choose(number, classes)
        run.emitted[phase] += float(stage.expected[:, drafts].take(classes).sum())
        run.price_ns[phase] += prices[drafts]
        accepted = np.minimum(stage.accepted[offset].take(place), drafts)
        if learn is not None:
            learn(drafts, accepted)
        place += accepted + 1
        run.widths.append(drafts + 1)
    return run


def _empty(stage: Stage) -> Run:
    phases = len(stage.trace.turns)
    return Run(np.zeros(phases), np.zeros(phases))


def play_oracle(stage: Stage, prices: Floats) -> Run:
    """Knows every lane's survival and every price.

    Greedy for tokens a second, or for each lane's own speed (the mean logarithm), which passes over
    tokens that would soon have come cheaply; the better of the two runs.
    """
    count = len(prices)
    best: Run | None = None
    for table in (stage.expected, np.log(stage.expected)):
        logarithm = table is not stage.expected

        def choose(_: int, classes: Ints, table: Floats = table, log: bool = logarithm) -> int:
            value = table.take(classes, 0).sum(0)[:count]
            score = value / len(classes) - np.log(prices) if log else value / prices
            return int(score.argmax())

        run = play(stage, prices, choose)
        if best is None or run.goodput > best.goodput:
            best = run
    assert best is not None
    return best


def observed_noise(rounds: int, seed: int, *, disturbed: float = DISTURBED_SHARE) -> Floats:
    """[rounds]: observed cost over price; `disturbed` = share of rounds that something delays."""
    rng = np.random.default_rng(seed)
    noise = np.maximum(1.0 + NOISE * rng.standard_normal(rounds), 0.3)
    noise[rng.random(rounds) < disturbed] *= DISTURBANCE
    drifted: Floats = noise * (1.0 + DRIFT * np.arange(rounds) / rounds)
    return drifted


def play_policy(
    stage: Stage,
    shapes: tuple[GraphShape, ...],
    prices: Floats,
    policy: VerificationPolicy,
    noise: Floats,
) -> Run:
    """The engine's own policy object, told what an engine would tell it."""
    player = _Cohorts(stage, policy)
    place = stage.start.copy()
    run = _empty(stage)
    active = int(Status.ACTIVE)
    for number, (phase, offset) in enumerate(stage.phases()):
        cohort = player.at(place)
        shape = policy.choose(cohort, shapes)
        drafts = shape.draft_tokens
        classes = stage.classes.take(place) + offset
        run.emitted[phase] += float(stage.expected[:, drafts].take(classes).sum())
        run.price_ns[phase] += prices[drafts]
        run.probe_ns += policy.decision().probe_ns
        accepted = np.minimum(stage.accepted[offset].take(place), drafts)
        place += accepted + 1
        records = tuple(
            [
                LaneRecord(
                    *(uid, 1, number, active, 0, 0, 0, drafts, drafts, passed, passed + 1),
                    *(0, 0, drafts + 1, 0, 0, ()),
                )
                for uid, passed in zip(player.uids, accepted.tolist(), strict=True)
            ]
        )
        policy.observe(CompletedRound(shape, records), int(prices[drafts] * noise[number]))
        run.widths.append(drafts + 1)
    return run


class _Cohorts:
    """Requests of every round; tells the policy of those that have ended."""

    def __init__(self, stage: Stage, policy: VerificationPolicy) -> None:
        self._stage = stage
        self._policy = policy
        self._numbers = np.full(stage.lanes, -1, dtype=np.int64)
        self._next_uid = 1
        self.uids = [0] * stage.lanes
        self._cohort = Cohort(())

    def at(self, place: Ints) -> Cohort:
        """The cohort at these positions."""
        numbers = self._stage.requests.take(place)
        changed = np.flatnonzero(numbers != self._numbers).tolist()
        if changed:
            for lane in changed:
                if self.uids[lane]:
                    self._policy.forget(self.uids[lane])
                self.uids[lane] = self._next_uid
                self._next_uid += 1
            self._numbers = numbers
            self._cohort = Cohort(tuple([CohortLane(uid, DEPTHS) for uid in self.uids]))
        return self._cohort


def priced(table: CostTable, lanes: int, capacity: int) -> tuple[tuple[GraphShape, ...], Floats]:
    """Shapes of a full batch and their prices."""
    shapes = catalog(lanes, capacity)
    return shapes, np.array([table.price(shape) for shape in shapes])

"""Packed rounds in the simulator: a drafter that forecasts, and texts that turn every few tokens.

A block drafter (contract: G3): every round but width one drafts seven tokens, and a round's price
follows the rows that the target verifies. In a packed round the rows go to the largest joint
forecasts of the lanes, which are the true chances, blurred anew for every draft: so fresh
confidence knows more than history does, and less than the truth. Where texts stay easy or hard for
long, packing gains little: rows for easy lanes hurry them to their next hard stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.policy.players import Ints, Stage, observed_noise
from benchmarks.policy.public import CONFIDENCE_BLUR
from benchmarks.policy.traces import DEPTHS, Floats, Synthetic
from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.contracts.shapes import GraphShape, packed_shapes, speculative_shapes
from flare_ray.controller.verification import (
    Cohort,
    CohortLane,
    CompletedRound,
    VerificationPolicy,
)

PACKED_ROWS = (2, 3, 4, 6)
BASE_NS = 8e6
DRAFT_NS = 1e6
ROW_NS = 0.3e6
"""A target pass, a block of drafts, and each target row."""
CAPACITY = 4096


@dataclass
class PackedRun:
    """What a policy achieved.

    Attributes:
        emitted: tokens its lanes were expected to emit, given the rows they got.
        packed_rounds: rounds of packed programs.
    """

    emitted: float = 0.0
    price_ns: float = 0.0
    rounds: int = 0
    packed_rounds: int = 0

    @property
    def goodput(self) -> float:
        """Expected tokens a nanosecond."""
        return self.emitted / self.price_ns

    @property
    def packed_share(self) -> float:
        """Share of rounds that were packed."""
        return self.packed_rounds / self.rounds


def price_ns(shape: GraphShape) -> float:
    """What a round costs."""
    return BASE_NS + DRAFT_NS * (shape.draft_tokens > 0) + ROW_NS * shape.rows


def assigned(forecasts: Floats, capacity: int) -> Ints:
    """[lanes] drafts: rows beyond one a lane go to the largest products of forecasts [lanes, 7]."""
    free = capacity - len(forecasts)
    order = np.argsort(-forecasts.cumprod(1), axis=None, kind="stable")[:free]
    counts: Ints = np.bincount(order // DEPTHS, minlength=len(forecasts))
    return counts


@dataclass
class PackedWorld:
    """Texts that turn from one curve to the next every few tokens."""

    lanes: int
    rounds: int
    curves: Sequence[Sequence[float]] = ((0.97,), (0.15,))
    phase_tokens: int = 12
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        made = Synthetic("packed", self.curves, phase_tokens=self.phase_tokens)
        self.stage = Stage(made.make(self.rounds, self.lanes), self.lanes, self.rounds)

    def catalog(self, *, packed: bool) -> tuple[GraphShape, ...]:
        """Programs of a full batch, fewest rows first."""
        shapes = speculative_shapes(self.lanes, (1, DEPTHS + 1), CAPACITY, block=True)
        if packed:
            shapes += packed_shapes(self.lanes, DEPTHS + 1, CAPACITY, PACKED_ROWS)
        full = [shape for shape in shapes if shape.batch_capacity == self.lanes]
        return tuple(sorted(full, key=lambda shape: shape.rows))

    def play(self, policy: VerificationPolicy, *, seed: int, packed: bool) -> PackedRun:
        """The engine's own policy object, told what an engine would tell it."""
        stage, shapes, run = self.stage, self.catalog(packed=packed), PackedRun()
        noise, rng = observed_noise(self.rounds, seed), np.random.default_rng(seed)
        place = stage.start.copy()
        lanes = np.arange(self.lanes)
        odds = np.log(stage.trace.chances / (1.0 - stage.trace.chances))
        for number in range(self.rounds):
            requests = stage.requests.take(place) * self.lanes + lanes
            cohort = Cohort(tuple([CohortLane(uid, DEPTHS) for uid in requests.tolist()]))
            shape = policy.choose(cohort, shapes)
            classes = stage.classes.take(place)
            drafts = np.full(self.lanes, shape.verify_width - 1)
            if shape.packed_capacity:
                blur = CONFIDENCE_BLUR * rng.standard_normal((self.lanes, DEPTHS))
                forecasts = 1.0 / (1.0 + np.exp(-odds[classes] - blur))
                drafts = assigned(forecasts, shape.packed_capacity)
            accepted = np.minimum(stage.accepted[0].take(place), drafts)
            run.emitted += float(stage.expected[classes, drafts].sum())
            run.price_ns += price_ns(shape)
            run.rounds += 1
            run.packed_rounds += shape.packed_capacity > 0
            records = _records(number, requests, drafts, accepted)
            policy.observe(CompletedRound(shape, records), int(price_ns(shape) * noise[number]))
            place += accepted + 1
        return run


def _records(number: int, requests: Ints, drafts: Ints, accepted: Ints) -> tuple[LaneRecord, ...]:
    active = int(Status.ACTIVE)
    return tuple(
        [
            LaneRecord(
                *(uid, 1, number, active, 0, 0, 0, DEPTHS, offered, passed, passed + 1),
                *(0, 0, DEPTHS + 1, 0, 0, ()),
            )
            for uid, offered, passed in zip(
                requests.tolist(), drafts.tolist(), accepted.tolist(), strict=True
            )
        ]
    )

"""Plays a verification policy against known survival and prices.

The simulated device draws each lane's accepted count from its own chances; the policy learns only
what a real one would. Prices may carry multiplicative noise and rare disturbances.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.contracts.shapes import GraphShape, speculative_shapes
from flare_ray.controller.verification import (
    Cohort,
    CohortLane,
    CompletedRound,
    VerificationPolicy,
)

Chances = Callable[[int, int], Sequence[float]]
"""(lane, round) -> conditional acceptance by depth, depth 1 first."""
Price = Callable[[GraphShape, int], float]
"""(shape, round) -> nanoseconds."""


CONTENTION_ROUNDS = 20
"""Mean length of a spell of contention."""


@dataclass(frozen=True)
class World:
    """What the policy does not know.

    Attributes:
        lanes: requests in every round.
        noise: standard deviation of a round's price, relative.
        disturbance: share of rounds that cost five times their price.
        contention: largest factor by which a busy neighbour stretches spells of rounds.
        request_rounds: rounds after which every lane holds a new request.
    """

    lanes: int
    chances: Chances
    price: Price
    noise: float = 0.1
    disturbance: float = 0.01
    contention: float = 1.0
    request_rounds: int = 200
    max_width: int = 8


@dataclass
class Outcome:
    """What a run achieved. `ideal_ns` prices the same rounds without noise."""

    emitted: float = 0.0
    ideal_ns: float = 0.0
    widths: tuple[int, ...] = ()
    probe_ns: float = 0.0

    @property
    def goodput(self) -> float:
        return self.emitted / self.ideal_ns


def catalog_of(world: World) -> tuple[GraphShape, ...]:
    shapes = speculative_shapes(world.lanes, range(1, world.max_width + 1), 4096)
    largest = max(shape.batch_capacity for shape in shapes)
    return tuple(shape for shape in shapes if shape.batch_capacity == largest)


def expected_emitted(chances: Sequence[float], drafts: int) -> float:
    total = survival = 1.0
    for chance in chances[:drafts]:
        survival *= chance
        total += survival
    return total


def simulate(policy: VerificationPolicy, world: World, *, rounds: int, seed: int) -> Outcome:
    """Run `policy`; goodput counts expected tokens, so that luck of the draw does not."""
    rng = random.Random(seed)
    catalog = catalog_of(world)
    outcome = Outcome()
    widths = []
    spell = 1.0
    for number in range(rounds):
        if rng.random() < 1 / CONTENTION_ROUNDS:
            spell = world.contention ** rng.random()
        generation = number // world.request_rounds
        uids = [1 + generation * world.lanes + lane for lane in range(world.lanes)]
        if number and number % world.request_rounds == 0:
            for uid in uids:
                policy.forget(uid - world.lanes)
        cohort = Cohort(tuple(CohortLane(uid, world.max_width - 1) for uid in uids))
        shape = policy.choose(cohort, catalog)
        records = []
        for lane, uid in enumerate(uids):
            chances = world.chances(lane, number)
            offered = shape.verify_width - 1
            accepted = 0
            while accepted < offered and rng.random() < chances[accepted]:
                accepted += 1
            outcome.emitted += expected_emitted(chances, offered)
            records.append(lane_record(uid, offered=offered, accepted=accepted))
        price = world.price(shape, number)
        outcome.ideal_ns += price
        noisy = price * spell * max(0.3, rng.gauss(1.0, world.noise))
        if rng.random() < world.disturbance:
            noisy *= 5
        policy.observe(CompletedRound(shape, tuple(records)), round(noisy))
        widths.append(shape.verify_width)
    outcome.widths = tuple(widths)
    return outcome


def lane_record(
    uid: int, *, offered: int, accepted: int, emitted: int = -1, status: int = Status.ACTIVE
) -> LaneRecord:
    count = accepted + 1 if emitted < 0 else emitted
    return LaneRecord(
        uid=uid,
        epoch=1,
        round_id=0,
        status=int(status),
        consumed=0,
        generated=0,
        budget_left=0,
        drafted=offered,
        offered=offered,
        accepted=accepted,
        emitted=count,
        copy_bits=0,
        draft_position=0,
        width=offered + 1,
        flags=0,
        checksum=0,
        tokens=(0,) * count,
    )


def best_fixed(world: World, *, rounds: int) -> tuple[float, int]:
    """Goodput and width of the best fixed width in hindsight."""
    best = (0.0, 0)
    for shape in catalog_of(world):
        emitted = ns = 0.0
        for number in range(rounds):
            ns += world.price(shape, number)
            emitted += sum(
                expected_emitted(world.chances(lane, number), shape.verify_width - 1)
                for lane in range(world.lanes)
            )
        best = max(best, (emitted / ns, shape.verify_width))
    return best

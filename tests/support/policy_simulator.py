"""Worlds for verification policies, played by the benchmark's players, and hand-made records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.policy.costs import catalog
from benchmarks.policy.players import (
    DISTURBED_SHARE,
    Run,
    Stage,
    observed_noise,
    play_fixed,
    play_policy,
)
from benchmarks.policy.traces import Synthetic
from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification import VerificationPolicy

SPELL_ROUNDS = 20
"""Mean length of a spell of contention."""


@dataclass(frozen=True)
class World:
    """What the policy does not know.

    Attributes:
        curves: conditional acceptance by depth; several = every request draws one.
        price: of a shape, in nanoseconds.
        noise: standard deviation of a round's cost, relative; None = the benchmark's noise.
        disturbed: share of rounds that take three times as long.
        contention: largest factor by which a busy neighbour stretches spells of rounds.
        phase_tokens: tokens after which a text turns to the next curve; 0 = never.
    """

    lanes: int
    curves: Sequence[Sequence[float]]
    price: Callable[[GraphShape], float]
    noise: float | None = None
    disturbed: float = DISTURBED_SHARE
    contention: float = 1.0
    phase_tokens: int = 0
    by_request: bool = False

    def play(self, policy: VerificationPolicy, *, rounds: int, seed: int) -> Run:
        """The policy's run."""
        noise = observed_noise(rounds, seed, disturbed=self.disturbed)
        rng = np.random.default_rng(seed)
        if self.noise is not None:
            noise = np.maximum(1.0 + self.noise * rng.standard_normal(rounds), 0.3)
        spells = np.cumsum(rng.random(rounds) < 1 / SPELL_ROUNDS)
        noise *= (self.contention ** rng.random(rounds + 1))[spells]
        shapes, prices = self._priced()
        return play_policy(self._stage(rounds), shapes, prices, policy, noise)

    def best_fixed(self, rounds: int) -> float:
        """Goodput of the best fixed width in hindsight."""
        _, prices = self._priced()
        return float((play_fixed(self._stage(rounds)) / prices).max())

    def _stage(self, rounds: int) -> Stage:
        made = Synthetic(
            "world", self.curves, by_request=self.by_request, phase_tokens=self.phase_tokens
        )
        trace = made.make(rounds, self.lanes)
        return Stage(trace, self.lanes, rounds)

    def _priced(self) -> tuple[tuple[GraphShape, ...], np.ndarray]:
        shapes = catalog(self.lanes, 4096)
        return shapes, np.array([self.price(shape) for shape in shapes])


def lane_record(
    uid: int, *, offered: int, accepted: int, emitted: int = -1, status: int = Status.ACTIVE
) -> LaneRecord:
    """A record of which only what a policy reads is told."""
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

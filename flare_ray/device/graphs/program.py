"""The seam between the executor and a backend: programs with static inputs, prepared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.shapes import GraphShape
from flare_ray.device.speculation.inputs import LaneBounds
from flare_ray.errors import ContractViolation

Prices = tuple[tuple[GraphShape, int], ...]
"""What rounds cost at preparation, in nanoseconds by shape."""


class Program(Protocol):
    """One catalog entry.

    Attributes:
        shape: what it was prepared for.
        record: [B, RECORD_FIELDS] int64, its output, a static buffer.
        scores: [B, W, SCORE_WORDS] int32, its second output (W = 1 for a prefill); written where a
            lane asks for log-probabilities.
        prompt_scores: [B, T, SCORE_WORDS] int32 of a scored prefill, else [B, 0, SCORE_WORDS].
        is_usual: its last run took the time that such runs take; False for those before and while
            it is recorded.
    """

    shape: GraphShape
    record: Tensor
    scores: Tensor
    prompt_scores: Tensor
    is_usual: bool

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """Copy a checked plan into the static inputs: one copy per buffer.

        Args:
            masks: [rows, words] int32 grammar rows, None where no lane is constrained; not read
                where the shape has a barrier.
            bounds: what the lanes' slots hold, as far as the host knows.
        """

    def draft(self) -> Tensor:
        """First part of a shape with a barrier: its drafts [B, W - 1] int64."""

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """Copy in what the host answered to the drafts; `replay` is the second part then.

        Args:
            masks: [rows, words] int32, written now.
        """

    def replay(self) -> None:
        """Run the program, or what a barrier has left of it; returns when its work is enqueued."""

    def warm(self) -> None:
        """Run it once on padded lanes only, which changes no slot."""


class Backend(Protocol):
    """All programs of one rank.

    Attributes:
        pool_bytes: device memory of recorded programs' intermediates, after `warm`; 0 where none
            is recorded.
    """

    pool_bytes: int

    def program(self, shape: GraphShape) -> Program:
        """The entry of `shape`.

        Raises:
            ContractViolation: the shape was not prepared; nothing is ever built on demand.
        """

    def warm(self) -> None:
        """Run every entry once, and record it where this backend does, so that the first request
        meets nothing new."""

    def prices(self, *, masked: bool) -> Prices:
        """Time every round once more, on padded lanes; after `warm`.

        Args:
            masked: False = rounds with masks are not timed and cost what the same round without
                masks does, which differs by little; on CPU their recordings take a good part of a
                start, and most engines never meet a grammar.
        """


def priced(
    shapes: Iterable[GraphShape], time_ns: Callable[[GraphShape], int], *, masked: bool
) -> Prices:
    """Prices of rounds as `Backend.prices` wants them; `time_ns` measures one."""
    every = tuple(shapes)
    twins = {shape: msgspec.structs.replace(shape, masked=False) for shape in every}
    timed = {s: time_ns(s) for s in every if masked or not s.masked or twins[s] not in every}
    return tuple((s, timed[s if s in timed else twins[s]]) for s in every)


def not_prepared(shape: GraphShape, prepared: int) -> ContractViolation:
    """The refusal of a shape outside the catalog."""
    return ContractViolation(
        f"{shape} was not prepared; the catalog holds {prepared} shapes, see the manifest"
    )

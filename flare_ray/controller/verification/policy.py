"""What a verification policy is asked and told.

A policy chooses one prepared program per round for the whole cohort; every lane then offers as many
drafts as the program and its own ceiling allow. It sees no text, no token and no clock: outcomes
and prices come through `observe`, so that equal inputs give equal decisions and a log replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from flare_ray.contracts.record import LaneRecord
from flare_ray.contracts.shapes import GraphShape


class CohortLane(msgspec.Struct, frozen=True, array_like=True):
    """One request of the coming round.

    Attributes:
        uid: the request.
        ceiling: most drafts that may be verified for it (budget, context; contract: C5).
    """

    uid: int
    ceiling: int


class Cohort(msgspec.Struct, frozen=True, array_like=True):
    """The requests that share the coming round."""

    lanes: tuple[CohortLane, ...]


class CompletedRound(msgspec.Struct, frozen=True, array_like=True):
    """A harvested round: the program that ran and its lanes' records, dead lanes included."""

    shape: GraphShape
    lanes: tuple[LaneRecord, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last width was chosen.

    Attributes:
        reason: "best" value over cost; "probe" = paid by the exploration account; "fixed"; "only"
            = nothing to choose from.
        expected_emitted / expected_ns: predictions for the chosen program; 0 where none was made.
        account_ns: what the exploration account could still spend.
    """

    shape: GraphShape
    reason: Literal["best", "probe", "fixed", "only"]
    expected_emitted: float = 0.0
    expected_ns: float = 0.0
    account_ns: float = 0.0


class VerificationPolicy(Protocol):
    """Chooses widths. Used by the controller's thread only."""

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """The program of the coming round.

        Args:
            cohort: at least one lane.
            catalog: for each width the program that would run, width one first.
        """

    def decision(self) -> Decision:
        """The last choice, explained.

        Raises:
            ContractViolation: nothing has been chosen yet.
        """

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """Learn from a round and from the whole time it took, host gap included."""

    def forget(self, uid: int) -> None:
        """The request has ended; unknown uids are no error."""

"""What a verification policy is asked and told.

A policy chooses one prepared program per round for the whole cohort; every lane then offers as many
drafts as the program and its own ceiling allow. It sees no text, no token and no clock: outcomes
and prices come through `observe`, so that equal inputs give equal decisions and a log replays.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from flare_ray.contracts.record import LaneRecord
from flare_ray.contracts.shapes import GraphShape

Reason = Literal["best", "kept", "probe", "fixed", "only"]


class ProposalSource(enum.IntEnum):
    """Where a draft comes from: the drafter, shared decoded history (contract: H1), the client's
    prediction, or the request's own prompt and output (contract: H3). Where text is found by the
    tokens in front of it, eight of them tell more than four (SHORT)."""

    LEARNED = 0
    HISTORY = 1
    PREDICTION = 2
    HISTORY_SHORT = 3
    REQUEST = 4
    REQUEST_SHORT = 5


class CohortLane(msgspec.Struct, frozen=True, array_like=True):
    """One request of the coming round.

    Attributes:
        uid: the request.
        ceiling: most drafts that may be verified for it (budget, context; contract: C5).
        sources: `ProposalSource` per depth; depths beyond it are LEARNED.
    """

    uid: int
    ceiling: int
    sources: tuple[int, ...] = ()


class Cohort(msgspec.Struct, frozen=True, array_like=True):
    """The requests that share the coming round."""

    lanes: tuple[CohortLane, ...]


class CompletedRound(msgspec.Struct, frozen=True, array_like=True):
    """A harvested round: the program that ran and its lanes' records, dead lanes included.

    Attributes:
        sources: per lane `ProposalSource` by depth, as in its cohort; () = all LEARNED.
        confidence: per lane the drafter's forecast that draft i passes given those before it; () =
            the program forecasts nothing (contract: C4).
        copies_alone: every draft on offer was copied, for which an eager program runs no drafter.
        is_usual: it took the time that such rounds take; else its time says nothing.
    """

    shape: GraphShape
    lanes: tuple[LaneRecord, ...]
    sources: tuple[tuple[int, ...], ...] = ()
    confidence: tuple[tuple[float, ...], ...] = ()
    copies_alone: bool = False
    is_usual: bool = True


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last width was chosen.

    Attributes:
        reason: "best" value over cost; "kept" = as good as the best within what a change of program
            costs; "probe" = paid by the exploration account; "fixed"; "only" = nothing to choose
            from.
        expected_emitted / expected_ns: predictions for the chosen program; 0 where none was made.
        account_ns: what the exploration account could still spend.
        probe_ns: time this choice is predicted to lose as a probe.
        regret_ns: expected shortfall of this round against the best candidate by present estimates;
            0 unless the choice was not the best.
        candidates / values / prices_ns: what was compared, in the catalog's order; () under fixed.
        inter_token_ns: under the objective "slo" the slowest lane's expected time between tokens by
            candidate; () under others.
    """

    shape: GraphShape
    reason: Reason
    expected_emitted: float = 0.0
    expected_ns: float = 0.0
    account_ns: float = 0.0
    probe_ns: float = 0.0
    regret_ns: float = 0.0
    candidates: tuple[GraphShape, ...] = ()
    values: tuple[float, ...] = ()
    prices_ns: tuple[float, ...] = ()
    inter_token_ns: tuple[float, ...] = ()


class VerificationPolicy(Protocol):
    """Chooses widths. Used by the controller's thread only."""

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """The program of the coming round.

        Args:
            cohort: at least one lane.
            catalog: programs that hold the cohort, width one first, then by width and packed
                capacity.
        """

    def decision(self) -> Decision:
        """The last choice, explained.

        Raises:
            ContractViolation: nothing has been chosen yet.
        """

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """Learn from a round and from the whole time it took, host gap included."""

    def expected_rate(self, lane: CohortLane) -> float:
        """What a round may be worth for one lane with these sources: tokens over price at the best
        width, in a unit of the policy's own."""

    def compared(self, uid: int, source: int, *, passed: int, failed: bool) -> None:
        """Learn from a copy that was found and not offered: the text itself has told.

        Args:
            passed: its first tokens that came as foretold.
            failed: another token came in place of the next one.
        """

    def forget(self, uid: int) -> None:
        """The request has ended; unknown uids are no error."""

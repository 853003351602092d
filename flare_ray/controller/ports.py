"""The controller's two seams: ranks below it, consumers of output beside it. Fakes implement the
same protocols."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flare_ray.contracts.messages import StreamItem
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import LaneRecord, Proposals
from flare_ray.contracts.tiers import TierOrder, TierOutcome


class RoundResult(msgspec.Struct, frozen=True):
    """One finished round, merged over ranks whose checksums agreed.

    lanes are in plan order; elapsed_ns is rank 0's program time; is_usual says whether every rank's
    program took its usual time.
    """

    round_id: int
    lanes: tuple[LaneRecord, ...]
    elapsed_ns: int
    is_usual: bool = True


class RankChannel(Protocol):
    """Ordered, bounded transport to all ranks of one engine (channel (c)). Used by one thread."""

    def submit(self, plan: RoundPlan) -> None:
        """Send `plan` to every rank; returns at once.

        Raises:
            RankFailure: a rank is gone.
        """

    def order(self, order: TierOrder) -> None:
        """Send a move of a snapshot to every rank, in one order with the plans; returns at once.

        Raises:
            RankFailure: a rank is gone.
        """

    def answer(self, answer: MaskAnswer) -> None:
        """Let the ranks go on from a barrier: its masks are written (contract: G5).

        Raises:
            RankFailure: a rank is gone.
        """

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        """Orders that every rank has reported since the last call; never blocks."""

    def receive(self, timeout_s: float) -> RoundResult | Proposals | None:
        """The oldest unanswered round once all ranks have answered it, or the drafts at its
        barrier, which `answer` must follow; None after `timeout_s`, or when an order's outcome can
        be taken.

        Raises:
            RankFailure: a rank died, answered an error, or checksums differ (contract: S6).
        """

    def wake(self) -> None:
        """Make a blocked `receive` return None now; the only method another thread may call."""

    def close(self) -> None:
        """Stop using the ranks; idempotent."""


class OutputPort(Protocol):
    """Where stream items go; called by the controller thread only."""

    def send(self, reply_to: str, items: tuple[StreamItem, ...]) -> None:
        """Deliver one round's items to the consumer at `reply_to`; must not block."""

"""Answers of all ranks to one round become one result, or the failure that stops the engine.

Owns the order of unanswered rounds and the comparison of checksums (contract: S6, T6); used by both
channels, so that threads and processes have one semantics.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from flare_ray.actors.wire import MAX_QUEUED_ROUNDS
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals, RoundReply, unpack_rows
from flare_ray.contracts.tiers import TierOrder, TierOutcome, TierReport
from flare_ray.controller.ports import RoundResult
from flare_ray.errors import ContractViolation, RankFailure


@dataclass(slots=True)
class _OpenRound:
    """One unanswered round and the replies so far, by rank."""

    round_id: int
    num_lanes: int
    replies: dict[int, RoundReply] = field(default_factory=dict)


class RoundMerger:
    """Queue of unanswered rounds of one engine. Used by the controller's thread only.

    Attributes:
        last_round: id of the last round submitted; -1 before the first.
        waiting_since_s: monotonic time from which the oldest unanswered round has had all ranks to
            itself: its submission, or the answer of the round before it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.last_round = -1
        self.waiting_since_s = 0.0
        self._open: deque[_OpenRound] = deque()
        self._orders: dict[int, dict[int, TierReport]] = {}
        self._outcomes: list[TierOutcome] = []
        self._proposals: Proposals | None = None
        self._barrier = -1

    def __len__(self) -> int:
        return len(self._open)

    def submitted(self, plan: RoundPlan) -> None:
        """Note that `plan` is on its way to all ranks.

        Raises:
            ContractViolation: too many rounds are unanswered, or the id does not rise.
        """
        if len(self._open) >= MAX_QUEUED_ROUNDS:
            raise ContractViolation(
                f"round {plan.round_id} would be number {len(self._open) + 1} in the queue, at "
                f"most {MAX_QUEUED_ROUNDS}: receive before submitting"
            )
        if plan.round_id <= self.last_round:
            raise ContractViolation(
                f"round id {plan.round_id} follows {self.last_round}; ids must rise"
            )
        if not self._open:
            self.waiting_since_s = time.monotonic()
        self.last_round = plan.round_id
        self._open.append(_OpenRound(plan.round_id, len(plan.lanes) or len(plan.prefill)))

    def answered(self, answer: MaskAnswer) -> None:
        """Note that the masks of a barrier are on their way to all ranks.

        Raises:
            ContractViolation: no rank waits for them.
        """
        if answer.round_id != self._barrier:
            raise ContractViolation(
                f"masks of round {answer.round_id} were sent, the open barrier is {self._barrier}"
            )
        self._barrier = -1

    def ordered(self, order: TierOrder) -> None:
        """Note that a move is on its way to all ranks."""
        self._orders[order.ticket] = {}

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        """Moves that all ranks have reported since the last call."""
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    @property
    def has_outcomes(self) -> bool:
        """Whether `take_outcomes` would return any."""
        return bool(self._outcomes)

    def add(self, rank: int, reply: RoundReply | Proposals | TierReport) -> None:
        """File one rank's reply under the oldest round it has not answered, or its report under
        the move that it belongs to.

        Raises:
            RankFailure: it carries an error (its first line; the rest becomes a note), or answers
                for another rank, round or move than it owes.
        """
        if isinstance(reply, TierReport):
            self._add_report(rank, reply)
            return
        if isinstance(reply, RoundReply) and reply.error:
            cause, _, details = reply.error.partition("\n")
            failure = RankFailure(
                f"rank {rank} failed in round {reply.round_id}: {cause}",
                rank=rank,
                round_id=reply.round_id,
            )
            if details:
                failure.add_note(details)
            raise failure
        owed = None
        for entry in self._open:
            if rank not in entry.replies:
                owed = entry
                break
        if owed is None or reply.round_id != owed.round_id or reply.rank != rank:
            expected = "nothing" if owed is None else f"round {owed.round_id}"
            raise RankFailure(
                f"rank {rank} answered as rank {reply.rank} for round {reply.round_id}, expected "
                f"{expected}: plans and replies have lost step",
                rank=rank,
                round_id=reply.round_id,
            )
        if isinstance(reply, Proposals):
            self._proposals, self._barrier = reply, reply.round_id
        else:
            owed.replies[rank] = reply

    def _add_report(self, rank: int, report: TierReport) -> None:
        reports = self._orders.get(report.ticket)
        if reports is None or rank in reports or report.rank != rank:
            raise RankFailure(
                f"rank {rank} reported as rank {report.rank} on move {report.ticket}, which it "
                "does not owe",
                rank=rank,
                round_id=self.last_round,
            )
        reports[rank] = report
        if len(reports) < self.world_size:
            return
        del self._orders[report.ticket]
        whole = [reports[rank] for rank in range(self.world_size)]
        worst = max(whole, key=lambda report: report.fault)
        where = f"rank {worst.rank}: " if worst.text else ""
        self._outcomes.append(
            TierOutcome(
                ticket=report.ticket,
                fault=worst.fault,
                num_bytes=max(report.num_bytes for report in whole),
                elapsed_ns=max(report.elapsed_ns for report in whole),
                checksums=tuple(report.checksum for report in whole),
                text=where + worst.text,
            )
        )

    @property
    def oldest_round(self) -> int:
        """Id of the oldest unanswered round; the last one submitted when all are answered."""
        return self._open[0].round_id if self._open else self.last_round

    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered the oldest unanswered round."""
        if not self._open:
            return ()
        answered = self._open[0].replies
        return tuple(rank for rank in range(self.world_size) if rank not in answered)

    def hung(self, limit_s: float) -> RankFailure | None:
        """The failure to report if the oldest unanswered round has waited `limit_s` or longer."""
        if not self._open:
            return None
        waited_s = time.monotonic() - self.waiting_since_s
        if waited_s < limit_s:
            return None
        missing = self.missing()
        return RankFailure(
            f"rank {missing[0]} hung in round {self.oldest_round}: no reply from ranks "
            f"{list(missing)} for {waited_s:.1f} s, at most {limit_s} s; raise rank_timeout_s if a "
            "round may take longer",
            rank=missing[0],
            round_id=self.oldest_round,
        )

    def pop(self) -> RoundResult | Proposals | None:
        """The drafts at a barrier that has opened, once; else the oldest round if all ranks have
        answered it.

        Raises:
            RankFailure: checksums differ, or rank 0's rows do not cover the plan's lanes.
        """
        if self._proposals is not None:
            proposals, self._proposals = self._proposals, None
            return proposals
        if not self._open or len(self._open[0].replies) < self.world_size:
            return None
        entry = self._open.popleft()
        self.waiting_since_s = time.monotonic()
        first = entry.replies[0]
        for rank in range(1, self.world_size):
            if entry.replies[rank].checksum != first.checksum:
                raise RankFailure(
                    f"ranks disagree in round {entry.round_id}: rank 0 reports checksum "
                    f"{first.checksum}, rank {rank} reports {entry.replies[rank].checksum}; their "
                    "tokens or random offsets differ (contract: S6)",
                    rank=-1,
                    round_id=entry.round_id,
                )
        lanes = unpack_rows(first.rows, first.scores, first.prompt_scores)
        if len(lanes) != entry.num_lanes:
            raise RankFailure(
                f"rank 0 returned {len(lanes)} records for the {entry.num_lanes} lanes of round "
                f"{entry.round_id}",
                rank=0,
                round_id=entry.round_id,
            )
        return RoundResult(
            round_id=entry.round_id,
            lanes=lanes,
            elapsed_ns=first.elapsed_ns,
            is_usual=all(reply.is_usual for reply in entry.replies.values()),
        )

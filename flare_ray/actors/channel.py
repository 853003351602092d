"""Channel (c), controller's side: one AF_UNIX SEQPACKET socket per rank (contract: A1, A4, S6).

Message boundaries are kept by the kernel, a dead peer is an end of file within a scheduler tick,
and closing is the abort signal: ranks exit when their socket closes (`rank_loop.py`). Measured
reasons against Ray calls and shared-memory rings: design/ray-serve.md section 2.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from flare_ray.actors.listener import RankLink
from flare_ray.actors.merge import RoundMerger
from flare_ray.actors.wire import (
    SEND_BUFFER_BYTES,
    decode_reply,
    encode_answer,
    encode_order,
    encode_plan,
    max_reply_bytes,
)
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals
from flare_ray.contracts.tiers import TierOrder, TierOutcome
from flare_ray.controller.ports import RoundResult
from flare_ray.errors import RankFailure

logger = logging.getLogger("ray.serve.flare")

FAULT_GRACE_S = 0.1
"""How long the channel listens to the other ranks after a rank has answered an error. A killed rank
closes its socket, and its peers' collectives fail milliseconds later: without a pause the engine
could blame a survivor."""


@dataclass(frozen=True, slots=True)
class _Sign:
    """What shows that a rank is lost; `died` = its socket closed without an error reply."""

    failure: RankFailure
    died: bool


class SocketChannel:
    """`RankChannel` over one socket per rank; the first failure is sticky.

    submit sends one message per rank and never waits; receive polls all sockets and the wake
    descriptor, so a rank that dies while the engine is idle is noticed too.

    Args:
        links: one per rank, in rank order; closed by `close`.
        rank_timeout_s: seconds without a reply after which a rank counts as hung.
    """

    def __init__(self, links: list[RankLink], rank_timeout_s: float) -> None:
        self.links = links
        self._rank_timeout_s = rank_timeout_s
        self._merger = RoundMerger(len(links))
        self._by_fd = {link.sock.fileno(): link for link in links}
        # One byte more than the limit shows an oversized message, which the kernel would cut.
        self._buffer = bytearray(max_reply_bytes() + 1)
        self._view = memoryview(self._buffer)
        self._failure: RankFailure | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards the descriptor alone: its number may belong to another file after close().
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        for link in links:
            link.sock.setblocking(False)
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._poll.register(link.sock, select.POLLIN)

    def submit(self, plan: RoundPlan) -> None:
        """Send `plan` to every rank; returns at once.

        Raises:
            RankFailure: a rank is gone or does not read; the channel is finished.
            ContractViolation: the plan is too large, out of order, or the queue is full.
        """
        self._raise_if_finished()
        message = encode_plan(plan)
        self._merger.submitted(plan)
        self._send(message)

    def order(self, order: TierOrder) -> None:
        """Send a move of a snapshot to every rank; returns at once.

        Raises:
            RankFailure: as `submit`.
        """
        self._raise_if_finished()
        message = encode_order(order)
        self._merger.ordered(order)
        self._send(message)

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        """See `RankChannel.take_outcomes`."""
        return self._merger.take_outcomes()

    def answer(self, answer: MaskAnswer) -> None:
        """Tell every rank that the masks of an open barrier are written; raises as `submit`."""
        self._raise_if_finished()
        self._merger.answered(answer)
        self._send(encode_answer(answer))

    def _send(self, message: bytes) -> None:
        for link in self.links:
            try:
                link.sock.send(message)
            except BlockingIOError:
                self._fail(self._failure_of(link, "no longer reads its plans"))
            except OSError:
                # What the rank said before it went, if anything, is still in the socket.
                self._fail(self._diagnose(self._read_reply(link) or self._gone(link)))

    def receive(self, timeout_s: float) -> RoundResult | Proposals | None:
        """The oldest unanswered round once all ranks have answered, or the drafts at its barrier;
        None on timeout, on wake, or when a move's outcome can be taken.

        Raises:
            RankFailure: a rank died, hung, answered an error, or checksums differ.
        """
        self._raise_if_finished()
        deadline = time.monotonic() + timeout_s
        while (result := self._pop()) is None:
            limit = deadline
            if len(self._merger):
                limit = min(limit, self._merger.waiting_since_s + self._rank_timeout_s)
            # poll counts whole milliseconds, rounded up: it never returns before the limit.
            ready = self._poll.poll(max(limit - time.monotonic(), 0.0) * 1000.0)
            if not ready:
                self._fail_if_hung()
                if time.monotonic() >= deadline:
                    return None
            woken = False
            for fd, _ in ready:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    woken = True
                elif (sign := self._read_reply(self._by_fd[fd])) is not None:
                    self._fail(self._diagnose(sign))
            if woken or self._merger.has_outcomes:
                return self._pop()
        return result

    def wake(self) -> None:
        """Make a blocked `receive`, or the next one, return now; callable from any thread."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close all sockets, which makes the ranks exit; idempotent."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        for link in self.links:
            link.close()

    def _pop(self) -> RoundResult | Proposals | None:
        try:
            return self._merger.pop()
        except RankFailure as failure:
            self._fail(failure)

    def _read_reply(self, link: RankLink) -> _Sign | None:
        """Read one message; None if it was a good reply or nothing, else the fault it shows."""
        try:
            size = link.sock.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if size == 0:
            return self._gone(link)
        if size > max_reply_bytes():
            cause = f"sent a reply of more than {max_reply_bytes()} bytes"
            return _Sign(self._failure_of(link, cause), died=False)
        try:
            self._merger.add(link.rank, decode_reply(self._view[:size]))
        except RankFailure as failure:
            return _Sign(failure, died=False)
        except msgspec.MsgspecError as error:
            return _Sign(self._failure_of(link, f"sent an unreadable reply: {error}"), died=False)
        return None

    def _gone(self, link: RankLink) -> _Sign:
        """The sign of a closed socket, with the rank's own last words where it left any."""
        cause, _, details = link.last_words().partition("\n")
        failure = self._failure_of(
            link, f"died: {cause or 'without a word, as when killed or out of memory'}"
        )
        if details:
            failure.add_note(details)
        return _Sign(failure, died=True)

    def _failure_of(self, link: RankLink, cause: str) -> RankFailure:
        last = self._merger.last_round
        when = f"in round {last}" if len(self._merger) else f"idle after round {last}"
        return RankFailure(
            f"rank {link.rank} (pid {link.pid}) {when}: {cause}", rank=link.rank, round_id=last
        )

    def _diagnose(self, first: _Sign) -> RankFailure:
        """Blame the rank that failed first: one that died outranks one that only complains.

        Listens to the others for FAULT_GRACE_S, because a survivor's broken collective may be heard
        before the end of file of the rank that broke it.
        """
        signs = {first.failure.rank: first}
        deadline = time.monotonic() + FAULT_GRACE_S
        waiting = {fd: link for fd, link in self._by_fd.items() if link.rank not in signs}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting and not any(sign.died for sign in signs.values()):
            ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000.0)
            if not ready:
                break
            for fd, _ in ready:
                if (sign := self._read_reply(waiting[fd])) is not None:
                    signs[waiting.pop(fd).rank] = sign
                    poll.unregister(fd)
        chosen = next((sign for sign in signs.values() if sign.died), first).failure
        for sign in signs.values():
            if sign.failure is not chosen:
                chosen.add_note(f"also: {sign.failure}")
        return chosen

    def _fail_if_hung(self) -> None:
        failure = self._merger.hung(self._rank_timeout_s)
        if failure is not None:
            self._fail(failure)

    def _raise_if_finished(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RankFailure(
                "the channel to the ranks is closed", rank=-1, round_id=self._merger.last_round
            )

    def _fail(self, failure: RankFailure) -> NoReturn:
        self._failure = failure
        # The only place that still has the rank's own traceback, in the failure's notes.
        logger.error("the engine stops in round %d", failure.round_id, exc_info=failure)
        raise failure

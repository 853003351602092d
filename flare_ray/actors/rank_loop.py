"""Channel (c), rank's side: read a plan, execute it, answer; and leave when nobody listens.

`serve_rank` is the loop, `HangUpWatch` ends the process while a program is running, `LastWords`
keeps what a dying process has to say where its engine can read it. None of them knows Ray.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from flare_ray.actors.masks import MaskReader
from flare_ray.actors.wire import (
    MAX_MESSAGE_BYTES,
    decode_order,
    encode_proposals,
    encode_reply,
    encode_report,
    error_reply,
)
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals, RoundReply
from flare_ray.contracts.tiers import TierOrder, TierReport
from flare_ray.errors import ContractViolation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

EXIT_HUNG_UP = 70
"""Exit status of a rank whose engine has closed the socket or died."""
EXIT_FAILED = 71
"""Exit status of a rank that answered an error: its state is no longer known."""


Barrier = Callable[[int, tuple[tuple[int, ...], ...]], MaskAnswer]
"""(round, drafts by lane) -> what the controller answered."""
Order = RoundPlan | TierOrder | MaskAnswer
"""What an engine sends to its ranks."""


class RankExecutor(Protocol):
    """What `device.prepare.prepare_rank` returns; fakes implement the same two names."""

    @property
    def manifest(self) -> PreparedManifest:
        """What was prepared."""

    def execute(
        self,
        plan: RoundPlan,
        masks: NDArray[np.int32] | None = None,
        barrier: Barrier | None = None,
    ) -> RoundReply:
        """Run one plan.

        Args:
            masks: [mask_rows, words] int32 when the plan names a mask block.
            barrier: asks the controller for the masks behind a round's drafts (contract: G5).
        """

    def order(self, order: TierOrder, report: Callable[[TierReport], None]) -> None:
        """Begin a move of a snapshot; returns at once.

        Args:
            report: told how it went, by another thread.
        """

    def close(self) -> None:
        """End threads of its own; idempotent."""


class LastWords:
    """Memory file that outlives this process in its engine's hands.

    Fatal signals (segmentation fault, abort) write their traceback here by `faulthandler`; a
    failure during preparation or a round is written by `say`. SIGKILL leaves nothing.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("flare-last-words", os.MFD_CLOEXEC)
        self._file = os.fdopen(self.fd, "ab", buffering=0)

    def catch_fatal_signals(self) -> None:
        """Send the tracebacks of fatal signals of this process here."""
        faulthandler.enable(self._file)

    def say(self, text: str) -> None:
        """Append `text`."""
        self._file.write(text.encode("utf-8", "replace") + b"\n")


class HangUpWatch:
    """Ends the process as soon as the engine's end of the socket closes, whatever it is doing.

    A program that waits in a collective for a dead peer never returns to the loop; without this
    thread it would keep its device memory until the collective's own timeout (contract: A4).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._fd = os.dup(sock.fileno())
        thread = threading.Thread(target=self._run, name="flare-hang-up", daemon=True)
        thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.poll()
        # No clean-up: exit handlers may wait for the very peer that is gone.
        os._exit(EXIT_HUNG_UP)


class EngineGone(ConnectionAbortedError):
    """The engine ended while a rank waited at a barrier."""


class Orders:
    """What the engine sends to one rank: plans and moves, and its answers at barriers.

    Args:
        read: waits for the next message; None once the engine has ended.
        show: sends a round's drafts.
    """

    def __init__(
        self, rank: int, read: Callable[[], Order | None], show: Callable[[Proposals], None]
    ) -> None:
        self._rank = rank
        self._read = read
        self._show = show
        self._plans: deque[RoundPlan | TierOrder] = deque()

    def next_plan(self) -> RoundPlan | TierOrder | None:
        """The next plan or move; None once the engine has ended.

        Raises:
            ContractViolation: an answer that nobody asked for.
        """
        if self._plans:
            return self._plans.popleft()
        order = self._read()
        if isinstance(order, MaskAnswer):
            raise ContractViolation(f"masks of round {order.round_id} outside its barrier")
        return order

    def barrier(self, round_id: int, drafts: tuple[tuple[int, ...], ...]) -> MaskAnswer:
        """Show the drafts, which are the same on every rank, and wait for the masks behind them; a
        plan queued behind this round may come first.

        Raises:
            EngineGone: there is no answer to come.
        """
        if self._rank == 0:
            self._show(Proposals(0, round_id, drafts))
        while (order := self._read()) is not None:
            if isinstance(order, MaskAnswer):
                return order
            self._plans.append(order)
        raise EngineGone("the engine ended at a barrier")


def _socket_orders(sock: socket.socket, rank: int) -> Orders:
    buffer = bytearray(MAX_MESSAGE_BYTES + 1)
    view = memoryview(buffer)

    def read() -> Order | None:
        # The sender bounds its messages, so a cut one does not decode and is answered as such.
        size = sock.recv_into(buffer)
        return decode_order(view[:size]) if size else None

    return Orders(rank, read, lambda proposals: sock.sendall(encode_proposals(proposals)))


def serve_rank(sock: socket.socket, executor: RankExecutor, *, rank: int) -> None:
    """Answer plans until the engine closes the socket or one fails.

    A failure is answered with its text and ends the loop: after it this rank's state is unknown,
    and the engine stops all ranks.

    Args:
        sock: blocking SEQPACKET socket.

    Raises:
        Exception: whatever `executor.execute` raised, after it has been answered.
    """
    masks = MaskReader(executor.manifest.vocab_size)
    report = _reporter(sock)
    orders = _socket_orders(sock, rank)
    round_id = -1
    try:
        while (plan := orders.next_plan()) is not None:
            if isinstance(plan, TierOrder):
                executor.order(plan, report)
                continue
            round_id = plan.round_id
            reply = run_plan(executor, plan, masks, orders.barrier)
            sock.sendall(encode_reply(reply))
    except ConnectionError:
        logger.info("rank %d: the engine is gone after round %d", rank, round_id)
    except Exception as error:
        logger.exception("rank %d failed in round %d", rank, round_id)
        _answer(sock, error_reply(rank, round_id, failure_text(error)))
        raise


def _reporter(sock: socket.socket) -> Callable[[TierReport], None]:
    """Sends reports of moves; a message is sent whole, whichever threads send at once."""

    def report(done: TierReport) -> None:
        try:
            sock.sendall(encode_report(done))
        except ConnectionError:
            # The loop notices the same, and ends the process.
            logger.info("move %d was done after the engine had gone", done.ticket)

    return report


def run_plan(
    executor: RankExecutor, plan: RoundPlan, masks: MaskReader, barrier: Barrier
) -> RoundReply:
    """Execute one plan with the masks that it names."""
    if plan.shape.has_barrier:
        return executor.execute(plan, masks.read(plan), barrier)
    return executor.execute(plan, masks.read(plan))


def failure_text(error: BaseException) -> str:
    """One line that names the error, then its traceback."""
    return (
        f"{type(error).__name__}: {error}".replace("\n", " | ")
        + "\n"
        + "".join(traceback.format_exception(error))
    )


def _answer(sock: socket.socket, reply: RoundReply) -> None:
    try:
        sock.sendall(encode_reply(reply))
    except ConnectionError:
        logger.warning("rank %d could not report its failure: the engine is gone", reply.rank)

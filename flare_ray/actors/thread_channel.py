"""Channel (c) inside one process: ranks are threads, replies a queue (contract: G8).

Same semantics as `channel.SocketChannel`: order, merging, checksums, sticky failure, wake. What a
thread cannot have is a death of its own: a hung rank is reported, not ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from flare_ray.actors.masks import MaskReader
from flare_ray.actors.merge import RoundMerger
from flare_ray.actors.rank_loop import (
    EngineGone,
    Order,
    Orders,
    RankExecutor,
    failure_text,
    run_plan,
)
from flare_ray.actors.wire import encode_order, encode_plan, error_reply
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals, RoundReply
from flare_ray.contracts.tiers import TierOrder, TierOutcome, TierReport
from flare_ray.controller.ports import RoundResult
from flare_ray.errors import RankFailure

logger = logging.getLogger("ray.serve.flare")

STOP_LIMIT_S = 5.0
"""Seconds that `close` gives rank threads to finish the round they are in."""

MakeExecutor = Callable[[int], RankExecutor]
"""Rank -> its prepared executor; called on the rank's own thread, since threads of a CPU kernel
pool, the current CUDA device and inference mode all belong to a thread."""

Reply = RoundReply | TierReport | Proposals

Abort = Callable[[int, BaseException], None]


class RankThreads:
    """Ranks of one engine as threads; each prepares its executor, then serves plans.

    Args:
        make_executor: called once per rank, all ranks at the same time.
        abort: told of a rank's failure; breaks the group's collectives, so that the others return.

    Raises:
        Exception: the first error of a rank's preparation, after all ranks have ended.
    """

    def __init__(self, world_size: int, make_executor: MakeExecutor, *, abort: Abort) -> None:
        self.plans: list[queue.SimpleQueue[Order | None]] = [
            queue.SimpleQueue() for _ in range(world_size)
        ]
        self.replies: queue.SimpleQueue[tuple[int, Reply] | None] = queue.SimpleQueue()
        self._make_executor = make_executor
        self._abort = abort
        self._prepared: queue.SimpleQueue[tuple[int, RankExecutor | BaseException]]
        self._prepared = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"flare-rank-{rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()
        self.executors = self._collect()

    def stop(self) -> None:
        """End the threads after the round they are in; idempotent."""
        for plans in self.plans:
            plans.put(None)
        deadline = time.monotonic() + STOP_LIMIT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if stuck := [thread.name for thread in self._threads if thread.is_alive()]:
            logger.error("%s did not stop in %.0f s", ", ".join(stuck), STOP_LIMIT_S)

    def _collect(self) -> list[RankExecutor]:
        executors: dict[int, RankExecutor] = {}
        failure: BaseException | None = None
        for _ in self._threads:
            rank, outcome = self._prepared.get()
            if not isinstance(outcome, BaseException):
                executors[rank] = outcome
            elif failure is None:
                # Later ones are consequences: their collectives were broken by this one's end.
                failure = outcome
                failure.add_note(f"while rank {rank} was being prepared")
        if failure is not None:
            self.stop()
            raise failure
        return [executors[rank] for rank in range(len(self._threads))]

    def _run(self, rank: int) -> None:
        try:
            executor = self._make_executor(rank)
        except BaseException as error:
            # Handed to the caller, who raises it; this thread only breaks the others' waiting.
            self._prepared.put((rank, error))
            self._abort(rank, error)
            return
        masks = MaskReader(executor.manifest.vocab_size)
        self._prepared.put((rank, executor))
        try:
            self._serve(rank, executor, masks)
        finally:
            executor.close()

    def _serve(self, rank: int, executor: RankExecutor, masks: MaskReader) -> None:
        def report(done: TierReport) -> None:
            self.replies.put((rank, done))

        orders = Orders(rank, self.plans[rank].get, lambda shown: self.replies.put((rank, shown)))
        while (plan := orders.next_plan()) is not None:
            try:
                if isinstance(plan, TierOrder):
                    executor.order(plan, report)
                    continue
                reply = run_plan(executor, plan, masks, orders.barrier)
            except EngineGone:
                return
            except Exception as error:
                round_id = plan.round_id if isinstance(plan, RoundPlan) else -1
                logger.exception("rank %d failed in round %d", rank, round_id)
                # Before the abort, so that the culprit's reply comes before its victims'.
                reply = error_reply(rank, round_id, failure_text(error))
                self.replies.put((rank, reply))
                self._abort(rank, error)
                return
            self.replies.put((rank, reply))


class ThreadChannel:
    """`RankChannel` over `RankThreads`.

    Args:
        rank_timeout_s: seconds without a reply after which a rank counts as hung.
    """

    def __init__(self, threads: RankThreads, rank_timeout_s: float) -> None:
        self._threads = threads
        self._rank_timeout_s = rank_timeout_s
        self._merger = RoundMerger(len(threads.plans))
        self._failure: RankFailure | None = None
        self._closed = False

    def submit(self, plan: RoundPlan) -> None:
        """Hand `plan` to every rank; raises as `SocketChannel.submit`.

        The plan is encoded too, so that what runs here is refused here if a socket would refuse it.
        """
        self._raise_if_finished()
        encode_plan(plan)
        self._merger.submitted(plan)
        for plans in self._threads.plans:
            plans.put(plan)

    def order(self, order: TierOrder) -> None:
        """As `SocketChannel.order`."""
        self._raise_if_finished()
        encode_order(order)
        self._merger.ordered(order)
        for plans in self._threads.plans:
            plans.put(order)

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        """As `SocketChannel.take_outcomes`."""
        return self._merger.take_outcomes()

    def answer(self, answer: MaskAnswer) -> None:
        """As `SocketChannel.answer`."""
        self._raise_if_finished()
        self._merger.answered(answer)
        for orders in self._threads.plans:
            orders.put(answer)

    def receive(self, timeout_s: float) -> RoundResult | Proposals | None:
        """As `SocketChannel.receive`."""
        self._raise_if_finished()
        deadline = time.monotonic() + timeout_s
        while (result := self._pop()) is None:
            now = time.monotonic()
            limit = deadline
            if len(self._merger):
                limit = min(limit, self._merger.waiting_since_s + self._rank_timeout_s)
            try:
                message = self._threads.replies.get(timeout=max(limit - now, 0.0))
            except queue.Empty:
                self._fail_if_hung()
                if time.monotonic() >= deadline:
                    return None
                continue
            if message is None:
                return self._pop()
            try:
                self._merger.add(*message)
            except RankFailure as failure:
                self._fail(failure)
            if self._merger.has_outcomes:
                return self._pop()
        return result

    def wake(self) -> None:
        """Make a blocked `receive`, or the next one, return now; callable from any thread."""
        self._threads.replies.put(None)

    def close(self) -> None:
        """Take no more rounds; idempotent. `RankThreads.stop` ends the ranks."""
        self._closed = True

    def _pop(self) -> RoundResult | Proposals | None:
        try:
            return self._merger.pop()
        except RankFailure as failure:
            self._fail(failure)

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

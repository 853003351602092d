"""Work that is given up on when it takes too long: a grammar must not hold the rounds of others.

A matcher's library cannot be interrupted, but it runs beside the interpreter. So its work is done
on a thread of its own, and whoever waits leaves that thread to itself once one piece has taken too
much processor time; the next piece gets a new thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Work = Callable[[], T]


class LimitedThread:
    """Runs pieces of work in order. Used by one thread.

    Args:
        limit_s: processor time of one piece, so that a busy host ends nothing; it is looked at
            once every `limit_s` of waiting.
    """

    def __init__(self, limit_s: float, *, name: str) -> None:
        self.limit_s = limit_s
        self._name = name
        self._worker: _Worker | None = None
        self._left: list[_Worker] = []

    @property
    def num_stuck(self) -> int:
        """Threads that are still busy with a piece that was given up on."""
        self._left = [worker for worker in self._left if worker.thread.is_alive()]
        return len(self._left)

    def run(self, works: Sequence[Work[T]]) -> list[T | None]:
        """Outcomes in order; None = it took too long and may still run: touch nothing it uses.

        Raises:
            Whatever a piece raised.
        """
        outcomes: list[T | None] = []
        while len(outcomes) < len(works):
            outcomes += self._run(works[len(outcomes) :])
            if len(outcomes) < len(works):
                outcomes.append(None)
        return outcomes

    def close(self) -> None:
        """End the thread; one that is stuck ends with its piece."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.orders.put(None)
            worker.thread.join()

    def _run(self, works: Sequence[Work[T]]) -> list[T]:
        """Outcomes up to the first piece that takes too long."""
        if self._worker is None:
            self._worker = _Worker(self._name)
        worker = self._worker
        batch = _Batch(works)
        worker.orders.put(batch)
        while True:
            try:
                worker.answers.get(timeout=self.limit_s)
                break
            except Empty:
                if worker.leave_over(self.limit_s):
                    self._worker = None
                    self._left.append(worker)
                    break
        if batch.error is not None:
            raise batch.error
        return batch.outcomes


class _Batch(Generic[T]):
    """Pieces that are handed over together, and what has come of them."""

    def __init__(self, works: Sequence[Work[T]]) -> None:
        self.works = works
        self.outcomes: list[T] = []
        self.error: BaseException | None = None


class _Worker:
    """One thread; both queues hold one batch at most."""

    def __init__(self, name: str) -> None:
        self.orders: SimpleQueue[_Batch[Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._was_left = False
        self._begun: float | None = None
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()
        assert self.thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self.thread.ident)

    def leave_over(self, limit_s: float) -> bool:
        """Leave the thread to itself if its present piece has taken more than `limit_s`; whether
        that was done. Its batch changes no more then."""
        with self._lock:
            if self._begun is None or time.clock_gettime(self._clock) - self._begun <= limit_s:
                return False
            self._was_left = True
            return True

    def _serve(self) -> None:
        while (batch := self.orders.get()) is not None:
            if not self._work(batch):
                return
            self.answers.put(None)

    def _work(self, batch: _Batch[Any]) -> bool:
        """Whether somebody still waits for it."""
        for work in batch.works:
            self._begun = time.thread_time()
            outcome: object = None
            error: BaseException | None = None
            try:
                outcome = work()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._begun = None
                if self._was_left:
                    return False
                if error is not None:
                    batch.error = error
                    return True
                batch.outcomes.append(outcome)
        return True

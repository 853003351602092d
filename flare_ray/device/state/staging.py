"""The threads of one rank that move snapshots beside its rounds (contract: M7).

    rank's thread    order arrives -> its saves run -> handed to one of the threads
    mover            STORE, LOAD: copies in memory, which never wait for a disk
    reader           READ: delays the requests that want what it reads
    writer           WRITE, SEAL, DELETE: delays nobody

Orders of one thread run in order; those of several meet in no region, since the controller gives a
region to nobody else while an order on it is open.

On CUDA the mover copies on a stream of its own, which first waits for what the rank's stream had
been given when the order arrived, and is drained before the move is reported.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flare_ray.contracts.tiers import (
    TierFault,
    TierMove,
    TierOrder,
    TierReport,
    manifest_path,
    part_path,
)
from flare_ray.device.state.snapshot_host import CorruptFile, SnapshotArena, write_durably

logger = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LINES: tuple[tuple[str, tuple[TierMove, ...]], ...] = (
    ("flare-mover", (TierMove.STORE, TierMove.LOAD)),
    ("flare-reader", (TierMove.READ,)),
    ("flare-writer", (TierMove.WRITE, TierMove.SEAL, TierMove.DELETE)),
)
"""Threads and what each moves."""
LINE_OF = {move: line for line, (_, moves) in enumerate(LINES) for move in moves}

Report = Callable[[TierReport], None]


@dataclass(frozen=True, slots=True)
class _Job:
    order: TierOrder
    report: Report
    ready: torch.cuda.Event | None


class Staging:
    """Mover, reader and writer of one rank.

    Args:
        loaded: told by the mover that an order's row holds its snapshot now.
    """

    def __init__(
        self,
        arena: SnapshotArena,
        rank: int,
        device: str,
        loaded: Callable[[TierOrder], None],
    ) -> None:
        self.arena = arena
        self._rank = rank
        self._loaded = loaded
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in LINES]
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True)
            for jobs, (name, _) in zip(self._queues, LINES, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, order: TierOrder, report: Report) -> None:
        """Hand an order over; called on the rank's thread, after everything ordered before."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._queues[LINE_OF[order.move]].put(_Job(order, report, ready))

    def stop(self) -> None:
        """End the threads after what they were given; idempotent."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        with torch.inference_mode():
            while (job := jobs.get()) is not None:
                job.report(self._done(job))

    def _done(self, job: _Job) -> TierReport:
        order, started = job.order, time.perf_counter_ns()
        fault, text, num_bytes, checksum = TierFault.NONE, "", 0, ""
        try:
            num_bytes, checksum = self._move(job)
        except CorruptFile as error:
            fault, text = TierFault.CORRUPT, str(error)
        except OSError as error:
            no_space = error.errno in NO_SPACE
            fault = TierFault.NO_SPACE if no_space else TierFault.FAILED
            text = f"{order.move.name.lower()} failed: {error}"
        except Exception as error:
            logger.exception("rank %d: move %d failed", self._rank, order.ticket)
            fault, text = TierFault.FAILED, f"{type(error).__name__}: {error}"
        return TierReport(
            ticket=order.ticket,
            rank=self._rank,
            fault=fault,
            num_bytes=num_bytes,
            elapsed_ns=time.perf_counter_ns() - started,
            checksum=checksum,
            text=text,
        )

    def _move(self, job: _Job) -> tuple[int, str]:
        order = job.order
        part = Path(part_path(order.path, self._rank))
        manifest = Path(manifest_path(order.path))
        if order.move is TierMove.WRITE:
            return self.arena.write(order, part)
        if order.move is TierMove.READ:
            return self.arena.read(order, part, order.checksums[self._rank]), ""
        if order.move is TierMove.SEAL:
            if self._rank == 0:
                write_durably(manifest, iter((order.manifest,)))
            return len(order.manifest), ""
        if order.move is TierMove.DELETE:
            # Every rank, since whichever comes first must not leave a manifest without its part.
            manifest.unlink(missing_ok=True)
            part.unlink(missing_ok=True)
            return 0, ""
        return self._copy(job), ""

    def _copy(self, job: _Job) -> int:
        copy = self.arena.store if job.order.move is TierMove.STORE else self.arena.load
        if self._stream is None or job.ready is None:
            num_bytes = copy(job.order)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(job.ready)
                num_bytes = copy(job.order)
            self._stream.synchronize()
        if job.order.move is TierMove.LOAD:
            self._loaded(job.order)
        return num_bytes

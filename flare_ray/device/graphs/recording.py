"""Recording programs as CUDA graphs, behind a seam that tests on the CPU can stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], object]


class Graph(Protocol):
    """A recorded program; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""


class Recorder(Protocol):
    """How programs are recorded."""

    def warm(self, run: Run) -> None:
        """Run a program once, as it will be recorded: kernels compile, libraries take their
        workspaces, constants reach the device."""

    def record(self, run: Run) -> Graph:
        """Record what `run` enqueues. It must not wait for the device or copy from the host."""

    def finish(self) -> int:
        """Nothing is recorded any more; bytes of the pool that all graphs share."""

    def time_ns(self, graph: Graph) -> int:
        """Device time of one replay."""

    def allocated_bytes(self) -> int:
        """Bytes handed out by the device's allocator so far, freed ones included: it stands still
        while programs are replayed (contract: G4)."""


class CudaRecorder:
    """Records on a stream of its own into one pool.

    Programs run one after another on one stream, so their intermediates may lie over each other;
    what must survive a program lies outside the pool. Other threads may go on using CUDA meanwhile
    ("thread_local"): the watchdog of a process group asks for the state of events.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._reserved = -1

    def warm(self, run: Run) -> None:
        """See `Recorder`."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Run) -> Graph:
        """See `Recorder`."""
        if self._reserved < 0:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    def finish(self) -> int:
        """See `Recorder`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - max(self._reserved, 0)

    def time_ns(self, graph: Graph) -> int:
        """See `Recorder`; the first replay also uploads the graph and is not timed."""
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    def allocated_bytes(self) -> int:
        """See `Recorder`."""
        return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])

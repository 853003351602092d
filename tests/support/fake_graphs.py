"""Recording without a device: a graph is the function itself, with every fact fixed at recording.

What only a device shows (waits, allocations, addresses) is left to `tests/gpu`; which variant a
plan gets, how inputs are staged and what a barrier divides is the same code.
"""

from __future__ import annotations

from collections.abc import Callable


class CallGraph:
    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class CallRecorder:
    """`Recorder` whose graphs call their function."""

    def __init__(self) -> None:
        self.warmed = 0
        self.graphs: list[CallGraph] = []
        self.finished = False
        self.leak_bytes = 0
        self._allocated = 0

    def warm(self, run: Callable[[], object]) -> None:
        assert not self.graphs, "a program was warmed after the first was recorded"
        self.warmed += 1
        run()

    def record(self, run: Callable[[], object]) -> CallGraph:
        assert not self.finished, "a program was recorded after the freeze"
        run()
        self.graphs.append(CallGraph(run))
        return self.graphs[-1]

    def finish(self) -> int:
        self.finished = True
        return 1 << 20

    def time_ns(self, graph: CallGraph) -> int:
        graph.replay()
        return 1000

    def allocated_bytes(self) -> int:
        self._allocated += self.leak_bytes
        return self._allocated

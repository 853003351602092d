"""Device times by graph replay, and the card's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls in order, compiled and warmed before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(
    graph: torch.cuda.CUDAGraph, *, replays: int = 20, before: Call | None = None
) -> float:
    """Median microseconds of one replay; `before` runs outside the measured time."""
    for _ in range(3):
        if before is not None:
            before()
        graph.replay()
    times = []
    for _ in range(replays):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def call_us(calls: Sequence[Call], *, repeat: int = 4) -> float:
    """Median microseconds of one call inside a graph; `calls` rotate over operands, so that weights
    come from memory and not from the cache."""
    chain = list(calls) * repeat
    return replay_us(captured(chain)) / len(chain)


def bandwidths() -> dict[str, float]:
    """Bytes a second, in TB/s: copying 1 GiB (read plus written) and reading 4 GiB."""
    source = torch.empty(2**28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = call_us([lambda: target.copy_(source)])
    wide = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    read = call_us([lambda: wide.sum()])
    return {
        "copy_tb_s": 2 * source.nbytes / copy / 1e6,
        "read_tb_s": wide.nbytes / read / 1e6,
    }

"""Where a captured round's time goes, kernel by kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.ops.timing import replay_us

_REPLAYS = 5
_LISTED = 16
_NAME = 44


def largest_kernels(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """A replay's microseconds, launches, and the kernels that take most of them, by name."""
    whole = replay_us(graph)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            spent[event.name[:_NAME]] += event.time_range.elapsed_us()
            count[event.name[:_NAME]] += 1
    return {
        "replay_us": round(whole),
        "kernels_us": round(sum(spent.values()) / _REPLAYS),
        "launches": round(sum(count.values()) / _REPLAYS),
        "largest": [
            {
                "us": round(total / _REPLAYS, 1),
                "count": round(count[name] / _REPLAYS),
                "kernel": name,
            }
            for name, total in spent.most_common(_LISTED)
        ],
    }

"""Whether an engine fits the memory of one rank, told as a sum (contract: M6)."""

from __future__ import annotations

import psutil
import torch

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.errors import CapacityError

GIB = 1 << 30
HEADROOM_RATIO = 0.05
"""Share of the free memory left for operators' intermediates; guess, revised by measurement."""


def check_capacity(manifest: PreparedManifest, rank_bytes: int) -> None:
    """Refuse what does not fit, with the whole sum (contract: M6).

    Args:
        rank_bytes: memory that one rank may use.
    Raises:
        CapacityError: the sum, what is there, and the settings that change each part.
    """
    if manifest.device == "cuda":
        _check_host_memory(manifest)
    parts = _rank_parts(manifest)
    needed = sum(size for _, size, _ in parts)
    usable = int(rank_bytes * (1 - HEADROOM_RATIO))
    if needed <= usable:
        return
    largest = max(parts, key=lambda part: part[1])
    raise CapacityError(
        f"{sum_text(manifest)}, {usable / GIB:.3f} GiB are usable "
        f"({rank_bytes / GIB:.3f} free less {HEADROOM_RATIO:.0%} headroom); {largest[0]} weigh "
        f"most: change {largest[2]}"
    )


def sum_text(manifest: PreparedManifest) -> str:
    """What one rank needs, part by part (contract: M6)."""
    parts = _rank_parts(manifest)
    summed = " + ".join(f"{name} {size / GIB:.3f}" for name, size, _ in parts)
    return f"one rank needs {sum(size for _, size, _ in parts) / GIB:.3f} GiB ({summed})"


def _rank_parts(manifest: PreparedManifest) -> tuple[tuple[str, int, str], ...]:
    """Part, bytes of the memory that programs run in, settings that change it."""
    budget = manifest.budget
    shared = manifest.device == "cpu"
    host = manifest.host_cache_bytes if shared else 0
    # what lies in files is cache of the operating system's, which gives it back
    tables = budget.table_bytes if shared and manifest.tables == "host" else 0
    return (
        ("weights", budget.weights_bytes, "tensor_parallel_size"),
        ("tables", tables, "tables"),
        ("pages", budget.page_bytes, "page_pool_tokens, concurrency or context_tokens"),
        ("state", budget.state_bytes, "concurrency or prefix_cache.device_bytes"),
        ("graph pool", budget.graph_pool_bytes, "concurrency or speculation.widths"),
        ("scratch", budget.scratch_bytes, "concurrency, prefill_tokens or speculation.widths"),
        ("host tier", host, "prefix_cache.host_bytes"),
    )


def _check_host_memory(manifest: PreparedManifest) -> None:
    """Page-locked memory can never be swapped out: what is not free now will not become so."""
    usable = int(free_bytes("cpu", manifest.world_size) * (1 - HEADROOM_RATIO))
    tables, cache = manifest.budget.table_bytes, manifest.host_cache_bytes
    if tables + cache > usable:
        raise CapacityError(
            f"one rank needs {(tables + cache) / GIB:.3f} GiB of host memory (tables "
            f"{tables / GIB:.3f} + prefix_cache.host_bytes {cache / GIB:.3f}), {usable / GIB:.3f} "
            "GiB of it are usable per rank; lower prefix_cache.host_bytes or set tables: device"
        )


def free_bytes(device: str, world_size: int) -> int:
    """Memory one rank may take now: its device's on CUDA, an equal share of the host's on CPU."""
    if device == "cuda":
        free, _total = torch.cuda.mem_get_info()
        return int(free)
    return int(psutil.virtual_memory().available) // world_size

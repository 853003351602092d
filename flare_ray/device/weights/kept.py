"""Which matrices stay on the device as stored, and which are dequantised (contract: M6, R5).

Only CUDA has kernels that unpack weights while they multiply, and only for routed experts: all
matrices of a layer's experts in one format, NVFP4 or block FP8, whose groups or blocks the ranks'
parts do not cut. Builders and the plan's byte count ask here, so they cannot differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flare_ray.device.weights.budget import rank_shape
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.index import scan_checkpoint
from flare_ray.device.weights.manifest import check_manifest
from flare_ray.recipes.declaration import Family, TensorSpec

EXPERTS = ".experts."
"""Between a layer's prefix and a routed expert's number, in every recipe that keeps them packed."""


def kept_format(
    formats: Iterable[WeightFormat], *, device: str, sizes: Iterable[int]
) -> WeightFormat:
    """In which format one layer's routed experts stay; PLAIN = they are dequantised.

    Args:
        formats: of all their stored matrices.
        sizes: rows and columns of one rank's matrices.
    """
    found = set(formats)
    if device != "cuda" or len(found) != 1:
        return WeightFormat.PLAIN
    (stored,) = found
    edge = {"nvfp4": GROUP, "fp8_block": DEFAULT_BLOCK[0]}.get(stored.kind)
    if edge is None or any(size % edge for size in sizes):
        return WeightFormat.PLAIN
    return stored


def kept_formats(
    folder: str | Path,
    specs: Sequence[TensorSpec],
    *,
    device: str,
    world_size: int,
    families: Iterable[Family],
) -> Callable[[TensorSpec], WeightFormat]:
    """Format in which each listed tensor is kept, from the headers of a checkpoint's files.

    Without files (a plan from config.json alone) everything counts as dequantised, the most that
    can be held.

    Args:
        specs: the recipe's manifest.
        families: families that are loaded.
    """
    kept: dict[str, WeightFormat] = {}
    index = scan_checkpoint(folder)[0] if device == "cuda" else None
    if index is not None and index.tensors:
        validated, _problems = check_manifest(index, specs, families=families)
        layers: dict[str, list[str]] = defaultdict(list)
        for name in validated.weights:
            if EXPERTS in name:
                layers[name.partition(EXPERTS)[0]].append(name)
        for names in layers.values():
            stored = [validated.weights[name] for name in names]
            sizes = {size for weight in stored for size in rank_shape(weight.spec, world_size)}
            chosen = kept_format((w.format for w in stored), device=device, sizes=sizes)
            kept.update(dict.fromkeys(names, chosen))
    return lambda spec: kept.get(spec.name, WeightFormat.PLAIN)

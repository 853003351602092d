"""Bytes of weights from shapes alone (contract: M6, R10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.mxfp4 import GROUP as MX_GROUP
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.manifest import BOTH_FAMILIES
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, TensorSpec

SCALE_BYTES = 4
"""A float32 scale: of an FP8 block, or of a whole NVFP4 matrix."""
INT64_BYTES = 8


def rank_shape(spec: TensorSpec, world_size: int) -> tuple[int, ...]:
    """Shape of one rank's part of a listed tensor, of the largest where parts differ.

    Raises:
        ConfigError: the ranks cannot share its `shard_dim` equally.
    """
    if spec.shard_dim is None or world_size == 1:
        return spec.shape
    sizes = [stop - start for start, stop in shard_bounds(spec, world_size)]
    shape = list(spec.shape)
    shape[spec.shard_dim] = max(sizes)
    return tuple(shape)


def shard_bounds(spec: TensorSpec, world_size: int) -> list[tuple[int, int]]:
    """Start and stop of every part along `shard_dim`, one per rank or `shard_limit` of them.

    Raises:
        ConfigError: the ranks cannot share its entries, or its parts, equally.
    """
    assert spec.shard_dim is not None
    total = spec.shape[spec.shard_dim]
    sharing = min(world_size, spec.shard_limit or world_size)
    parts = len(spec.shard_sizes) or total
    if parts % sharing:
        what = "parts" if spec.shard_sizes else "entries"
        raise ConfigError(
            f"{spec.name}: dimension {spec.shard_dim} has {parts} {what}, which {sharing} ranks "
            "cannot share equally; choose another tensor_parallel_size"
        )
    each = parts // sharing
    edges = [place * each for place in range(sharing)]
    if spec.shard_sizes:
        edges = [sum(spec.shard_sizes[:edge]) for edge in edges]
    return list(zip(edges, [*edges[1:], total], strict=True))


def format_bytes(
    shape: tuple[int, ...],
    format: WeightFormat,
    *,
    element_bytes: int,
    block: tuple[int, int] = DEFAULT_BLOCK,
    scale_bytes: int = SCALE_BYTES,
) -> int:
    """Bytes of a tensor of this shape, its scales included.

    Args:
        shape: unpacked; a matrix unless `format` is PLAIN.
        element_bytes: of one element where `format` is PLAIN.
        block: rows and columns of an FP8 block.
        scale_bytes: of one FP8 block's scale.
    """
    count = math.prod(shape)
    if format is WeightFormat.PLAIN:
        return count * element_bytes
    rows, columns = shape
    if format is WeightFormat.FP8_BLOCK:
        return count + scale_bytes * -(-rows // block[0]) * -(-columns // block[1])
    if format is WeightFormat.MXFP4:
        return count // 2 + count // MX_GROUP
    return count // 2 + count // GROUP + SCALE_BYTES


def rank_weight_bytes(
    specs: Iterable[TensorSpec],
    *,
    world_size: int,
    element_bytes: int,
    families: Iterable[Family] = BOTH_FAMILIES,
    format_of: Callable[[TensorSpec], WeightFormat] | None = None,
) -> int:
    """Weight bytes of one rank: required tensors, divided where their specs say so.

    Args:
        specs: a recipe's manifest.
        world_size: TP degree.
        element_bytes: of the type in which plain tensors are kept.
        families: families that are loaded.
        format_of: format in which a tensor is *kept*; None = all plain, which is what a loader
            that dequantises keeps whatever the checkpoint stores.
    Raises:
        ConfigError: a tensor that `world_size` ranks cannot share.
    """
    wanted = frozenset(families)
    total = 0
    for spec in specs:
        if spec.family not in wanted or not spec.required:
            continue
        shape = rank_shape(spec, world_size)
        format = WeightFormat.PLAIN if format_of is None else format_of(spec)
        stored = INT64_BYTES if spec.integer else element_bytes
        total += format_bytes(shape, format, element_bytes=stored)
    return total

"""Bytes of weights from shapes alone (contract: M6, R10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.mxfp4 import GROUP as MX_GROUP
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.manifest import BOTH_FAMILIES
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, TensorSpec

SCALE_BYTES = 4
"""A float32 scale: of an FP8 block, or of a whole NVFP4 matrix."""
FLOAT32_BYTES, INT64_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class HeldForm:
    """How a rank holds a tensor.

    Attributes:
        format: packed, or plain.
        element_bytes: of one element where plain; 0 = the engine's type.
        block: rows and columns of an FP8 block.
        scale_bytes: of one FP8 block's scale.
        off_device: it lies in host memory or in its file, not where programs compute.
    """

    format: WeightFormat = WeightFormat.PLAIN
    element_bytes: int = 0
    block: tuple[int, int] = DEFAULT_BLOCK
    scale_bytes: int = SCALE_BYTES
    off_device: bool = False


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of one rank's tensors where programs compute, and elsewhere."""

    device: int
    elsewhere: int


def rank_shape(spec: TensorSpec, world_size: int) -> tuple[int, ...]:
    """Shape of one rank's part of a listed tensor, of the largest where parts differ.

    Raises:
        ConfigError: the ranks cannot share its `shard_dim` equally.
    """
    if spec.shard_dim is None or world_size == 1:
        return spec.shape
    if spec.padded and len(spec.shard_sizes) % world_size:
        each = -(-len(spec.shard_sizes) // world_size)
        return _with(spec, each * max(spec.shard_sizes))
    sizes = [stop - start for start, stop in shard_bounds(spec, world_size)]
    return _with(spec, max(sizes))


def _with(spec: TensorSpec, size: int) -> tuple[int, ...]:
    """The tensor's shape with another size of its `shard_dim`."""
    assert spec.shard_dim is not None
    shape = list(spec.shape)
    shape[spec.shard_dim] = size
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
    if format is WeightFormat.FP8_TENSOR:
        return count
    rows, columns = shape
    if format is WeightFormat.FP8_BLOCK:
        return count + scale_bytes * -(-rows // block[0]) * -(-columns // block[1])
    if format is WeightFormat.MXFP4:
        return count // 2 + count // MX_GROUP
    return count // 2 + count // GROUP + SCALE_BYTES


def held_bytes(
    specs: Iterable[TensorSpec],
    *,
    world_size: int,
    element_bytes: int,
    families: Iterable[Family] = BOTH_FAMILIES,
    form_of: Callable[[TensorSpec], HeldForm] | None = None,
) -> HeldBytes:
    """Weight bytes of one rank: required tensors, divided where their specs say so.

    Args:
        specs: a recipe's manifest.
        world_size: TP degree.
        element_bytes: of the engine's type.
        families: families that are loaded.
        form_of: how a tensor is *held*; None = all plain, which is what a loader that dequantises
            keeps whatever the checkpoint stores.
    Raises:
        ConfigError: a tensor that `world_size` ranks cannot share.
    """
    wanted = frozenset(families)
    totals = {False: 0, True: 0}
    for spec in specs:
        if spec.family not in wanted or not spec.required:
            continue
        form = HeldForm() if form_of is None else form_of(spec)
        totals[form.off_device] += format_bytes(
            rank_shape(spec, world_size),
            form.format,
            element_bytes=form.element_bytes or _element_bytes(spec, element_bytes),
            block=form.block,
            scale_bytes=form.scale_bytes,
        )
    return HeldBytes(totals[False], totals[True])


def _element_bytes(spec: TensorSpec, element_bytes: int) -> int:
    """Of a plain tensor in the type in which it is held."""
    if spec.integer:
        return INT64_BYTES
    return max(element_bytes, FLOAT32_BYTES) if spec.wide else element_bytes


def rank_weight_bytes(
    specs: Iterable[TensorSpec],
    *,
    world_size: int,
    element_bytes: int,
    families: Iterable[Family] = BOTH_FAMILIES,
    form_of: Callable[[TensorSpec], HeldForm] | None = None,
) -> int:
    """As `held_bytes`, wherever they lie."""
    held = held_bytes(
        specs,
        world_size=world_size,
        element_bytes=element_bytes,
        families=families,
        form_of=form_of,
    )
    return held.device + held.elsewhere

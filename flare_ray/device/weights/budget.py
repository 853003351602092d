"""Bytes of weights from shapes alone (contract: M6, R10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.manifest import BOTH_FAMILIES
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, TensorSpec

SCALE_BYTES = 4
"""A float32 scale: of an FP8 block, or of a whole NVFP4 matrix."""
BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4


def rank_shape(spec: TensorSpec, world_size: int) -> tuple[int, ...]:
    """Shape of one rank's part of a listed tensor.

    Raises:
        ConfigError: the ranks cannot share its `shard_dim` equally.
    """
    if spec.shard_dim is None or world_size == 1:
        return spec.shape
    size = spec.shape[spec.shard_dim]
    if size % world_size:
        raise ConfigError(
            f"{spec.name}: dimension {spec.shard_dim} has {size} entries, which {world_size} ranks "
            "cannot share equally; choose another tensor_parallel_size"
        )
    shape = list(spec.shape)
    shape[spec.shard_dim] = size // world_size
    return tuple(shape)


def format_bytes(
    shape: tuple[int, ...],
    format: WeightFormat,
    *,
    element_bytes: int,
    block: tuple[int, int] = DEFAULT_BLOCK,
) -> int:
    """Bytes of a tensor of this shape, its scales included.

    Args:
        shape: unpacked; a matrix unless `format` is PLAIN.
        element_bytes: of one element where `format` is PLAIN.
        block: rows and columns of an FP8 block.
    """
    count = math.prod(shape)
    if format is WeightFormat.PLAIN:
        return count * element_bytes
    rows, columns = shape
    if format is WeightFormat.FP8_BLOCK:
        return count + SCALE_BYTES * -(-rows // block[0]) * -(-columns // block[1])
    return count // 2 + count // GROUP + SCALE_BYTES


def rank_weight_bytes(
    specs: Iterable[TensorSpec],
    *,
    world_size: int,
    element_bytes: int,
    families: Iterable[Family] = BOTH_FAMILIES,
    format_of: Callable[[TensorSpec], WeightFormat] | None = None,
    second_layout_bytes: int = 0,
) -> int:
    """Weight bytes of one rank: required tensors, divided where their specs say so.

    Args:
        specs: a recipe's manifest.
        world_size: TP degree.
        element_bytes: of the type in which plain tensors are kept.
        families: families that are loaded.
        format_of: format in which a tensor is *kept*; None = all plain, which is what a loader
            that dequantises keeps whatever the checkpoint stores.
        second_layout_bytes: per element of a matrix, of the layout that is kept beside the first
            (`cpu_second_layout_bytes`); 0 = there is none.
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
        total += format_bytes(shape, format, element_bytes=element_bytes)
        if len(shape) == 2:
            total += math.prod(shape) * second_layout_bytes
    return total


def cpu_second_layout_bytes(config_json: Mapping[str, Any]) -> int:
    """Bytes per matrix element of the second layout that float32 CPU ranks keep.

    Products of few rows read a matrix in a layout of their own, in bfloat16 where that is exact and
    in float32 elsewhere (device/ops/linear, device/ops/moe). Exactness is a matter of numbers; what
    config.json says of them is believed, and quantised weights, which are scaled, are not exact.
    A bound: matrices too small for a packed layout keep one, and lookup tables keep none.

    Args:
        config_json: of the checkpoint; its `dtype` (formerly `torch_dtype`) is that of the tensors.
    """
    text = config_json.get("text_config")
    places = [config_json, *([text] if isinstance(text, Mapping) else [])]
    if any(place.get("quantization_config") is not None for place in places):
        return FLOAT32_BYTES
    declared = {place.get(name) for place in places for name in ("dtype", "torch_dtype")} - {None}
    return BFLOAT16_BYTES if declared == {"bfloat16"} else FLOAT32_BYTES

"""Routed experts that stay packed on the device, read from checkpoints that store them so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare_ray.device.ops.moe.packed import Fp8Stack, Nvfp4Stack, Stack
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts
from flare_ray.device.weights.kept import kept_format
from flare_ray.recipes.reading import RankReader

PARTS = ("gate_proj", "up_proj", "down_proj")


def packed_stack(
    reader: RankReader[Any], names: Sequence[str], *, width: int, hidden: int
) -> Stack | None:
    """A layer's routed experts as stored, or None where they are not to stay packed.

    Args:
        names: of the experts, without their matrices' part.
    """
    weights = reader.weights
    formats = {weights.format(f"{name}.{part}.weight") for name in names for part in PARTS}
    kept = kept_format(formats, device=weights.device.type, sizes=(width, hidden))
    if kept is WeightFormat.PLAIN:
        return None
    kind = Fp8Stack if kept is WeightFormat.FP8_BLOCK else Nvfp4Stack
    stack = kind.empty(len(names), width, hidden, weights.device)
    for expert, name in enumerate(names):
        gate, up = (reader.packed_rows(f"{name}.{part}.weight") for part in PARTS[:2])
        down = reader.packed_columns(f"{name}.{PARTS[2]}.weight")
        fill = _fill_fp8 if isinstance(stack, Fp8Stack) else _fill_nvfp4
        fill(stack, expert, (gate, up, down))
    return stack


def _fill_nvfp4(stack: Any, expert: int, parts: tuple[Any, ...]) -> None:
    gate, up, down = parts
    width = gate.packed.shape[0]
    for part, rows in ((gate, slice(0, width)), (up, slice(width, 2 * width))):
        stack.gate_up[expert, rows] = part.packed
        stack.gate_up_scale[expert, rows] = part.block_scale
    stack.down[expert], stack.down_scale[expert] = down.packed, down.block_scale
    for place, part in enumerate(parts):
        assert isinstance(part, Nvfp4Parts)
        stack.factors[expert, place] = part.global_multiplier


def _fill_fp8(stack: Any, expert: int, parts: tuple[Any, ...]) -> None:
    gate, up, down = parts
    width, high = gate.weight.shape[0], gate.scale_inv.shape[0]
    for number, part in enumerate((gate, up)):
        assert isinstance(part, Fp8BlockParts) and part.offset == (0, 0)
        stack.gate_up[expert, number * width : (number + 1) * width] = part.weight
        stack.gate_up_scale[expert, number * high : (number + 1) * high] = part.scale_inv
    stack.down[expert], stack.down_scale[expert] = down.weight, down.scale_inv

"""Routed experts that stay packed, read from checkpoints that store them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flare_ray.device.ops.ahead.api import shapes_alone
from flare_ray.device.ops.moe.api import PackedExperts, SharedExperts
from flare_ray.device.ops.moe.packed import Fp8Stack, Mxfp4Stack, Nvfp4Stack, Stack
from flare_ray.device.ops.moe.reference import Rounding
from flare_ray.device.ops.moe.unpack.api import UnpackScratch
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.mxfp4 import Mxfp4Parts
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts
from flare_ray.device.weights.kept import EXPERTS, kept_format
from flare_ray.errors import CheckpointError
from flare_ray.recipes.reading import RankReader

PARTS = ("gate_proj", "up_proj", "down_proj")
BIASED_LARGEST = 127 + 8
"""Largest exponent of an MXFP4 scale: kernels' bfloat16 operands hold no more, 255 is no number."""


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A layer's routed experts in a checkpoint.

    Attributes:
        names: of the experts, without their matrices' part.
        width, hidden: of one rank's matrices.
        parts: gate, up and down in the checkpoint's words.
    """

    names: Sequence[str]
    width: int
    hidden: int
    parts: tuple[str, str, str] = PARTS


def packed_stack(reader: RankReader[Any], stored: StoredExperts) -> Stack | None:
    """The experts as stored, or None where they are not to stay packed.

    Raises:
        ConfigError: they were to stay packed whatever else, and cannot.
        CheckpointError: a scale that cannot be one.
    """
    weights = reader.weights
    named = [f"{name}.{part}.weight" for name in stored.names for part in stored.parts]
    matrices = [weights.stored(name) for name in named if weights.has(name)]
    sizes = (stored.width, stored.hidden)
    layer = named[0].partition(EXPERTS)[0]
    kept = kept_format(matrices, weights.keeping, sizes=sizes, layer=layer)
    if kept is WeightFormat.PLAIN:
        return None
    kinds: dict[str, type[Any]] = {"fp8_block": Fp8Stack, "mxfp4": Mxfp4Stack}
    kind = kinds.get(kept.kind, Nvfp4Stack)
    stack: Stack = kind.empty(len(stored.names), *sizes, weights.device)
    for expert, name in enumerate(stored.names):
        gate, up = (reader.packed_rows(f"{name}.{part}.weight") for part in stored.parts[:2])
        down = reader.packed_columns(f"{name}.{stored.parts[2]}.weight")
        _FILL[kind](stack, expert, (gate, up, down))
    if isinstance(stack, Mxfp4Stack) and not shapes_alone(weights.device):
        _check_exponents(stack, layer)
    return stack


def packed_experts(
    reader: RankReader[Any],
    stack: Stack,
    shared: SharedExperts | None,
    *,
    top_k: int,
    limit: float,
    rounding: Rounding | None = None,
) -> PackedExperts:
    """A layer's experts; on CPU all layers of the rank unpack into one scratch."""
    scratch = reader.weights.once("unpacked experts", UnpackScratch)
    return PackedExperts(
        stack, shared, top_k=top_k, limit=limit, rounding=rounding, scratch=scratch
    )


def _check_exponents(stack: Mxfp4Stack, layer: str) -> None:
    for scale in (stack.gate_up_scale, stack.down_scale):
        largest = int(scale.max())
        if largest > BIASED_LARGEST:
            raise CheckpointError(
                f"the routed experts of {layer} have a scale of 2^{largest - 127}, no weight is "
                f"as large (at most 2^{BIASED_LARGEST - 127}); download the checkpoint again"
            )


def _fill_nvfp4(stack: Nvfp4Stack, expert: int, parts: tuple[Any, ...]) -> None:
    gate, up, down = parts
    width = gate.packed.shape[0]
    for part, rows in ((gate, slice(0, width)), (up, slice(width, 2 * width))):
        stack.gate_up[expert, rows] = part.packed
        stack.gate_up_scale[expert, rows] = part.block_scale
    stack.down[expert], stack.down_scale[expert] = down.packed, down.block_scale
    for place, part in enumerate(parts):
        assert isinstance(part, Nvfp4Parts)
        stack.factors[expert, place] = part.global_scale
    stack.divides = gate.global_divides


def _fill_mxfp4(stack: Mxfp4Stack, expert: int, parts: tuple[Any, ...]) -> None:
    gate, up, down = parts
    width = gate.packed.shape[0]
    for part, rows in ((gate, slice(0, width)), (up, slice(width, 2 * width))):
        assert isinstance(part, Mxfp4Parts)
        stack.gate_up[expert, rows] = part.packed
        stack.gate_up_scale[expert, rows] = part.exponents
    stack.down[expert], stack.down_scale[expert] = down.packed, down.exponents


def _fill_fp8(stack: Fp8Stack, expert: int, parts: tuple[Any, ...]) -> None:
    gate, up, down = parts
    width, high = gate.weight.shape[0], gate.scale_inv.shape[0]
    for number, part in enumerate((gate, up)):
        assert isinstance(part, Fp8BlockParts) and part.offset == (0, 0)
        stack.gate_up[expert, number * width : (number + 1) * width] = part.weight
        stack.gate_up_scale[expert, number * high : (number + 1) * high] = part.scale_inv
    stack.down[expert], stack.down_scale[expert] = down.weight, down.scale_inv


_FILL: dict[type[Any], Any] = {
    Nvfp4Stack: _fill_nvfp4,
    Mxfp4Stack: _fill_mxfp4,
    Fp8Stack: _fill_fp8,
}

"""Writes plain matrices as NVFP4 and block FP8: the reverse of the loader, deterministic.

Every scale that applies to more than sixteen weights is a power of two, and a group scale times a
code has six significant bits: dequantised values are exact in bfloat16, so an engine that holds
them in bfloat16 computes with the very weights that a float32 one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts, quantise_fp8_block
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts, quantise_nvfp4

Choice = Callable[[str, Tensor], WeightFormat]
"""The format of a tensor, by its name and value: plain, FP8_BLOCK or NVFP4_MODELOPT."""

PACKED_DTYPES = frozenset({torch.uint8, torch.float8_e4m3fn})
ALGORITHMS = {WeightFormat.FP8_BLOCK: "FP8_PB_WO", WeightFormat.NVFP4_MODELOPT: "NVFP4"}
"""How a mixed-precision configuration spells the two formats."""


def quantised_parts(weight: Tensor, form: WeightFormat) -> Fp8BlockParts | Nvfp4Parts:
    """One matrix [N, K] in `form`.

    Raises:
        ValueError: `form` is none that this module writes.
    """
    if form is WeightFormat.FP8_BLOCK:
        return quantise_fp8_block(weight, exact=True)
    if form is WeightFormat.NVFP4_MODELOPT:
        return quantise_nvfp4(weight, exact=True)
    written = ", ".join(ALGORITHMS)
    raise ValueError(f"no quantiser writes {form}; choose one of {written}")


def rounded(weight: Tensor, form: WeightFormat) -> Tensor:
    """The matrix as it reads back from `form`, in its own type and on its own device."""
    if form is WeightFormat.PLAIN:
        return weight
    return quantised_parts(weight, form).dequantise(torch.float32).to(weight.dtype)


def quantise_tensors(tensors: Mapping[str, Tensor], choice: Choice) -> dict[str, Tensor]:
    """Stored tensors of a checkpoint: the plain ones as they are, parts for the others.

    Args:
        tensors: by published name.
        choice: format of each.
    Returns:
        FP8 matrices as `NAME` and `NAME_scale_inv`, NVFP4 ones as `NAME`, `NAME_scale` and
        `NAME_scale_2`, where NAME ends with `.weight`.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        form = choice(name, tensor)
        if form is WeightFormat.PLAIN:
            stored[name] = tensor
            continue
        parts = quantised_parts(tensor, form)
        if isinstance(parts, Fp8BlockParts):
            stored |= {name: parts.weight, f"{name}_scale_inv": parts.scale_inv}
        else:
            stored |= {name: parts.packed, f"{name}_scale": parts.block_scale}
            stored[f"{name}_scale_2"] = parts.global_scale
    return stored


def dequantise_tensors(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The reverse of `quantise_tensors`; matrices that were quantised come back in `dtype`.

    Raises:
        ValueError: a packed tensor lacks the scales that `quantise_tensors` writes beside it.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale_inv", ".weight_scale", ".weight_scale_2")):
            continue
        if f"{name}_scale_inv" in stored:
            out[name] = Fp8BlockParts(tensor, stored[f"{name}_scale_inv"]).dequantise(dtype)
        elif f"{name}_scale_2" in stored:
            scales = stored[f"{name}_scale"], stored[f"{name}_scale_2"]
            out[name] = Nvfp4Parts(tensor, *scales).dequantise(dtype)
        elif tensor.dtype in PACKED_DTYPES:
            raise ValueError(
                f"{name} is stored as {tensor.dtype} without _scale_inv or _scale_2 beside it; "
                "only checkpoints that quantise_tensors wrote can be read back here"
            )
        else:
            out[name] = tensor
    return out


def declaration_of(tensors: Mapping[str, Tensor], choice: Choice) -> dict[str, Any]:
    """`quantization_config` of what `quantise_tensors` writes: mixed precision, by module."""
    forms = {name: choice(name, tensor) for name, tensor in tensors.items()}
    layers = {
        name.removesuffix(".weight"): {"quant_algo": ALGORITHMS[form]}
        for name, form in sorted(forms.items())
        if form in ALGORITHMS
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }

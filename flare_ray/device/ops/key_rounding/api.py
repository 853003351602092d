"""Values rounded to FP8 and FP4 grids and back, groups of channels sharing a scale.

A model trained with such rounding needs it in every forward pass; the results are exact in
bfloat16, so a cache may hold them unpacked. Scales that are powers of two are found on the bits:
2^ceil(log2(x)) by arithmetic would miss at powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.errors import ContractViolation

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def round_fp8(x: Tensor, *, group: int = 32) -> Tensor:
    """E4M3 with a power-of-two scale per group of the last dimension's channels."""
    grouped = _grouped(x, group)
    scale = power_of_two_above(_largest(grouped, 1e-4) * (1 / E4M3_MAX))
    scaled = (grouped / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale).flatten(-2).to(x.dtype)


def round_fp4(x: Tensor, *, group: int = 32) -> Tensor:
    """E2M1 with a power-of-two scale per group."""
    grouped = _grouped(x, group)
    scale = power_of_two_above(_largest(grouped, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
    return _on_fp4_grid(grouped, scale).to(x.dtype)


def round_fp4_e4m3(x: Tensor, *, group: int = 16) -> Tensor:
    """E2M1 with an E4M3 scale per group."""
    grouped = _grouped(x, group)
    scale = (_largest(grouped, E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp_(max=E4M3_MAX)
    return _on_fp4_grid(grouped, scale.to(torch.float8_e4m3fn).to(torch.float32)).to(x.dtype)


def power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) of positive float32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).to(torch.int32).view(torch.float32)


def _grouped(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise ContractViolation(f"{x.shape[-1]} channels are not groups of {group}")
    return x.to(torch.float32).unflatten(-1, (-1, group))


def _largest(grouped: Tensor, floor: float) -> Tensor:
    return grouped.abs().amax(-1, keepdim=True).clamp_(min=floor)


def _on_fp4_grid(grouped: Tensor, scale: Tensor) -> Tensor:
    scaled = (grouped / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    size = scaled.abs()
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6: even codes are even multiples of their step, so ties go to even
    step = torch.full_like(size, 0.5).masked_fill_(size >= 2, 1.0).masked_fill_(size >= 4, 2.0)
    return ((scaled / step).round_() * step * scale).flatten(-2)

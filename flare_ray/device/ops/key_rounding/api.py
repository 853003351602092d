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
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TIES_DOWN, TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Half-way points of `E2M1` that go to the lower and to the upper neighbour: to the even one."""


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
    # the bucket's number is the number of half-way points passed; exact ties by the two lists
    down = torch.tensor(TIES_DOWN, device=size.device)
    up = torch.tensor(TIES_UP, device=size.device)
    place = torch.bucketize(size, down) + torch.bucketize(size, up, right=True)
    grid = torch.tensor(E2M1, device=size.device)
    return (torch.copysign(grid[place], scaled) * scale).flatten(-2)

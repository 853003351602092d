"""Values rounded to FP8 and FP4 grids and back, groups of channels sharing a scale.

A model trained with such rounding needs it in every forward pass; the results are exact in
bfloat16, so a cache may hold them unpacked. Scales that are powers of two are found on the bits:
2^ceil(log2(x)) by arithmetic would miss at powers of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flare_ray.device.ops.key_rounding import reference
from flare_ray.device.ops.key_rounding.reference import power_of_two_above
from flare_ray.errors import ContractViolation

__all__ = ["power_of_two_above", "round_fp4", "round_fp4_e4m3", "round_fp8"]


def round_fp8(x: Tensor, *, group: int = 32) -> Tensor:
    """E4M3 with a power-of-two scale per group of the last dimension's channels."""
    return _rounded(x, group, reference.round_fp8)


def round_fp4(x: Tensor, *, group: int = 32) -> Tensor:
    """E2M1 with a power-of-two scale per group."""
    return _rounded(x, group, reference.round_fp4)


def round_fp4_e4m3(x: Tensor, *, group: int = 16) -> Tensor:
    """E2M1 with an E4M3 scale per group."""
    return _rounded(x, group, reference.round_fp4_e4m3)


def _rounded(x: Tensor, group: int, in_torch: Callable[[Tensor], Tensor]) -> Tensor:
    """x, of its own type, by a rounding or its compiled form."""
    if x.shape[-1] % group:
        raise ContractViolation(f"{x.shape[-1]} channels are not groups of {group}")
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from flare_ray.device.ops.key_rounding import numba

        return numba.round_groups(x, group=group, kind=numba.KINDS[in_torch.__name__])
    grouped = x.to(torch.float32).unflatten(-1, (-1, group))
    return in_torch(grouped).flatten(-2).to(x.dtype)

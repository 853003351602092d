"""The roundings in torch, channels in groups [..., groups, group] float32."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def round_fp8(grouped: Tensor) -> Tensor:
    """See `api.round_fp8`."""
    scale = power_of_two_above(_largest(grouped, 1e-4) * (1 / E4M3_MAX))
    scaled = (grouped / scale).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale


def round_fp4(grouped: Tensor) -> Tensor:
    """See `api.round_fp4`."""
    scale = power_of_two_above(_largest(grouped, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
    return _on_fp4_grid(grouped, scale)


def round_fp4_e4m3(grouped: Tensor) -> Tensor:
    """See `api.round_fp4_e4m3`."""
    scale = (_largest(grouped, E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp_(max=E4M3_MAX)
    return _on_fp4_grid(grouped, scale.to(torch.float8_e4m3fn).to(torch.float32))


def power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) of positive float32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).to(torch.int32).view(torch.float32)


def _largest(grouped: Tensor, floor: float) -> Tensor:
    return grouped.abs().amax(-1, keepdim=True).clamp_(min=floor)


def _on_fp4_grid(grouped: Tensor, scale: Tensor) -> Tensor:
    scaled = (grouped / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    size = scaled.abs()
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6: even codes are even multiples of their step, so ties go to even
    step = torch.full_like(size, 0.5).masked_fill_(size >= 2, 1.0).masked_fill_(size >= 4, 2.0)
    return (scaled / step).round_() * step * scale

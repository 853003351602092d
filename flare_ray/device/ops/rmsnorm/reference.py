"""RMS norm as its definition says."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """weight * cast(x * rsqrt(mean(x^2) + eps)): statistics in float32, cast before the weight."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)

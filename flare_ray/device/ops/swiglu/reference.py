"""Bounded SwiGLU as its definition says."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): gate is bounded from above only."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

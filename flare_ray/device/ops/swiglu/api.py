"""Gated activation of a fused gate-and-up product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.errors import ContractViolation


def clamped_swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate_up: [..., 2 I], gate first.
        limit: gate is bounded from above only, up on both sides.
    Returns:
        [..., I], contiguous.
    Raises:
        ContractViolation: an odd last dimension.
    """
    width = gate_up.shape[-1]
    if width % 2:
        raise ContractViolation(f"gate_up has {width} columns, expected an even number")
    if gate_up.is_cuda and gate_up.is_contiguous():
        from flare_ray.device.ops.swiglu import triton

        return triton.clamped_swiglu(gate_up.view(-1, width), limit=limit).view(
            *gate_up.shape[:-1], width // 2
        )
    if gate_up.device.type == "cpu" and gate_up.dtype == torch.float32:
        from flare_ray.device.ops.swiglu import numba

        return numba.clamped_swiglu(gate_up, limit=limit)
    gate, up = gate_up[..., : width // 2], gate_up[..., width // 2 :]
    return F.silu(gate.clamp(max=limit), inplace=True).mul_(up.clamp(-limit, limit))

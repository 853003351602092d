"""Bounded SwiGLU of fused gate-and-up rows on CUDA, in float32, one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_SLICE = 1024


@triton.jit
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 tiles."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(both, out, width, limit, SLICE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = place < width
    gate = tl.load(both + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    active = gated(gate, up, limit)
    tl.store(out + row * width + place, active.to(out.dtype.element_ty), mask=inside)


def clamped_swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """Rows [R, 2 I] contiguous -> [R, I]."""
    rows, double = gate_up.shape
    out = gate_up.new_empty((rows, double // 2))
    grid = (rows, triton.cdiv(double // 2, _SLICE))
    _swiglu[grid](gate_up, out, double // 2, limit, SLICE=_SLICE, num_warps=4)
    return out

"""Block-FP8 experts, packed in memory: W [BN, 128] times x^T [128, 16], weights widened on the way.

As `moe/triton.py`, with one scale per tile of K: a tile of outputs lies inside one block of 128
rows, so the scale is a number that multiplies the tile's partial sum in float32. E4M3 is exact in
bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.moe.pack.triton import block_members, pack
from flare_ray.device.ops.moe.packed import Fp8Stack
from flare_ray.device.ops.moe.reference import Rounding
from flare_ray.device.ops.moe.triton import BLOCK, combine
from flare_ray.device.ops.swiglu.triton import gated

_TILE = 64


@triton.jit
def _product(codes, scales, line, width, source, has, BN: tl.constexpr, BLOCK: tl.constexpr):
    """[BN, BLOCK] float32: matrix rows from `line` on times the rows at `source` [1, BLOCK]."""
    total = tl.zeros((BN, BLOCK), tl.float32)
    n = line + tl.arange(0, BN)
    for start in range(0, width, 128):
        k = start + tl.arange(0, 128)
        rows = tl.load(source + k[:, None], mask=has[None, :], other=0.0)
        w = tl.load(codes + n[:, None] * width + k[None, :]).to(rows.dtype)
        part = tl.dot(w, rows, input_precision="ieee")
        total += part * tl.load(scales + (line // 128) * (width // 128) + start // 128)
    return total


@triton.jit
def _gate_up(
    x,
    codes,
    scales,
    expert,
    filled,
    members,
    out,
    hidden,
    width,
    limit,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
):
    """x [R, hidden]; codes [E, 2 width, hidden]; out [M, width]."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    source = x + (member // TOP_K)[None, :] * hidden
    first = tl.program_id(0) * BN
    line = e * 2 * width + first
    gate = _product(codes, scales, line, hidden, source, has, BN, BLOCK)
    up = _product(codes, scales, line + width, hidden, source, has, BN, BLOCK)
    place = out + member[None, :] * width + (first + tl.arange(0, BN))[:, None]
    tl.store(place, gated(gate, up, limit).to(out.dtype.element_ty), mask=has[None, :])


@triton.jit
def _down(
    active,
    codes,
    scales,
    expert,
    filled,
    members,
    out,
    hidden,
    width,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
):
    """active [M, width]; codes [E, hidden, width]; out [M, hidden] float32."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    first = tl.program_id(0) * BN
    source = active + member[None, :] * width
    total = _product(codes, scales, e * hidden + first, width, source, has, BN, BLOCK)
    place = out + member[None, :] * hidden + (first + tl.arange(0, BN))[:, None]
    tl.store(place, total, mask=has[None, :])


class Fp8Experts:
    """Routed experts of one layer.

    Args:
        stack: kept as it is.
        limit: bound of the activation's inputs.
        rounding: as `Fp4Experts`.
    """

    def __init__(self, stack: Fp8Stack, *, limit: float, rounding: Rounding | None = None) -> None:
        self._stack = stack
        self._limit = limit
        self._rounding = rounding

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        """As `api.Experts.__call__`; `extra` [R, H] is added to the sum."""
        stack, blocks = self._stack, pack(experts, block=BLOCK)
        hidden, width = stack.down.shape[1:]
        count = blocks.expert.shape[0]
        listed = (blocks.expert, blocks.filled, blocks.members)
        tiles = {"BLOCK": BLOCK, "BN": _TILE, "num_warps": 4, "num_stages": 3}
        kind = x.dtype if self._rounding is None else torch.float32
        active = x.new_empty((count, width), dtype=kind)
        _gate_up[(width // _TILE, count)](
            x.contiguous(),
            stack.gate_up,
            stack.gate_up_scale,
            *listed,
            active,
            hidden,
            width,
            self._limit,
            TOP_K=experts.shape[1],
            **tiles,
        )
        if self._rounding is not None:
            active = self._rounding(active.mul_(weights.reshape(-1, 1))).to(x.dtype)
            weights = torch.ones_like(weights)
        parts = x.new_empty((count, hidden), dtype=torch.float32)
        _down[(hidden // _TILE, count)](
            active, stack.down, stack.down_scale, *listed, parts, hidden, width, **tiles
        )
        return combine(parts, weights, extra, x.dtype)

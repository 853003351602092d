"""NVFP4 experts with several rows an expert: W [BN, BK] times x^T [BK, 16] in bfloat16.

A code becomes a bfloat16 by moving bits: its three magnitude bits go to bits 6 to 8, its sign to
bit 15, which is the value times 2^-126. The block scale times 2^119 is exact in bfloat16 too, and a
product of both has at most six significant bits, so nothing rounds before the sum; the float32 sum
takes the matrix's own scale times 2^7. Low and high nibbles are even and odd columns, which go
into two products, so nothing is interleaved.

The operands' trip through shared memory makes it 4.8 to 5.4 times the time of the bytes at any
number of rows (gpu_operators.json), so it is for passes of more than 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.moe.pack.triton import Blocks, block_members
from flare_ray.device.ops.swiglu.triton import gated


@triton.jit
def _value(code, scale, EXACT: tl.constexpr):
    """Codes 0 .. 15 int16 and scales float32 -> operands; EXACT: bfloat16, times 2^-7."""
    if EXACT:
        bits = ((code & 7) << 6) | ((code & 8) << 12)
        # 6.646e35 = 2 ** 119
        unit = (scale * 6.646139978924579e35).to(tl.bfloat16)
        value = bits.to(tl.bfloat16, bitcast=True) * unit
    else:
        size = (code & 7).to(tl.float32)
        size = tl.where(size < 4, size * 0.5, tl.where(size < 6, size - 2, 2 * size - 8))
        value = tl.where(code > 7, -size, size) * scale * 0.0078125
    return value


@triton.jit
def _step(
    total,
    codes,
    scales,
    line,
    even,
    odd,
    start,
    width,
    inside,
    BN: tl.constexpr,
    BH: tl.constexpr,
    EXACT: tl.constexpr,
):
    """total += W x^T over the bytes from `start` on of the matrix rows `line` [BN]."""
    byte = start + tl.arange(0, BH)
    mask = inside[:, None] & (byte < width // 2)[None, :]
    packed = tl.load(codes + line[:, None] * (width // 2) + byte[None, :], mask=mask, other=0)
    packed = packed.to(tl.int16)
    group = start // 8 + tl.arange(0, BH // 8)
    there = inside[:, None] & (group < width // 16)[None, :]
    scale = tl.load(scales + line[:, None] * (width // 16) + group[None, :], mask=there)
    scale = tl.where(there, scale.to(tl.float32), 0.0)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, BH // 8, 8)), (BN, BH))
    total = tl.dot(_value(packed & 15, scale, EXACT), even, total, input_precision="ieee")
    return tl.dot(_value((packed >> 4) & 15, scale, EXACT), odd, total, input_precision="ieee")


@triton.jit
def _gate_up(
    x,
    codes,
    scales,
    factor,
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
    BH: tl.constexpr,
    EXACT: tl.constexpr,
):
    """x [R, hidden]; codes [E, 2 width, hidden / 2]; out [M, width]."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    source = x + (member // TOP_K)[None, :] * hidden
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    line = e * 2 * width + n
    gate = tl.zeros((BN, BLOCK), tl.float32)
    up = tl.zeros((BN, BLOCK), tl.float32)
    for start in range(0, hidden // 2, BH):
        byte = start + tl.arange(0, BH)
        real = byte < hidden // 2
        there = has[None, :] & real[:, None]
        even = tl.load(source + 2 * byte[:, None], mask=there, other=0.0)
        odd = tl.load(source + 2 * byte[:, None] + 1, mask=there, other=0.0)
        gate = _step(gate, codes, scales, line, even, odd, start, hidden, n < width, BN, BH, EXACT)
        up = _step(
            up, codes, scales, line + width, even, odd, start, hidden, n < width, BN, BH, EXACT
        )
    gate = gate * (tl.load(factor + e * 3) * 128.0)
    up = up * (tl.load(factor + e * 3 + 1) * 128.0)
    active = gated(gate, up, limit)
    place = out + member[None, :] * width + n[:, None]
    tl.store(place, active.to(out.dtype.element_ty), mask=has[None, :] & (n < width)[:, None])


@triton.jit
def _down(
    active,
    codes,
    scales,
    factor,
    expert,
    filled,
    members,
    out,
    hidden,
    width,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    EXACT: tl.constexpr,
):
    """active [M, width]; codes [E, hidden, width / 2]; out [M, hidden] float32."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    source = active + member[None, :] * width
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    line = e * hidden + n
    total = tl.zeros((BN, BLOCK), tl.float32)
    for start in range(0, width // 2, BH):
        byte = start + tl.arange(0, BH)
        real = byte < width // 2
        there = has[None, :] & real[:, None]
        even = tl.load(source + 2 * byte[:, None], mask=there, other=0.0)
        odd = tl.load(source + 2 * byte[:, None] + 1, mask=there, other=0.0)
        total = _step(
            total, codes, scales, line, even, odd, start, width, n < hidden, BN, BH, EXACT
        )
    total = total * (tl.load(factor + e * 3 + 2) * 128.0)
    place = out + member[None, :] * hidden + n[:, None]
    tl.store(place, total, mask=has[None, :] & (n < hidden)[:, None])


def _tiles(dtype: torch.dtype) -> dict[str, int | bool]:
    if dtype == torch.bfloat16:
        return {"BN": 64, "BH": 128, "EXACT": True, "num_warps": 4, "num_stages": 3}
    return {"BN": 64, "BH": 32, "EXACT": False, "num_warps": 4, "num_stages": 1}


def activated(
    x: Tensor, codes: Tensor, scales: Tensor, factors: Tensor, blocks: Blocks, *, limit: float
) -> Tensor:
    """Activated rows [M, I] of every assignment; see `Nvfp4Stack` for the weights."""
    count, width = blocks.expert.shape[0], codes.shape[1] // 2
    out = x.new_empty((count, width))
    tiles = _tiles(x.dtype)
    _gate_up[(triton.cdiv(width, tiles["BN"]), count)](
        x.contiguous(),
        codes,
        scales,
        factors,
        blocks.expert,
        blocks.filled,
        blocks.members,
        out,
        x.shape[1],
        width,
        limit,
        TOP_K=count // x.shape[0],
        BLOCK=blocks.block,
        **tiles,
    )
    return out


def lowered(
    active: Tensor, codes: Tensor, scales: Tensor, factors: Tensor, blocks: Blocks
) -> Tensor:
    """Down products [M, H] float32 of every assignment."""
    count, width = active.shape
    hidden = codes.shape[1]
    out = active.new_empty((count, hidden), dtype=torch.float32)
    tiles = _tiles(active.dtype)
    _down[(triton.cdiv(hidden, tiles["BN"]), count)](
        active,
        codes,
        scales,
        factors,
        blocks.expert,
        blocks.filled,
        blocks.members,
        out,
        hidden,
        width,
        BLOCK=blocks.block,
        **tiles,
    )
    return out

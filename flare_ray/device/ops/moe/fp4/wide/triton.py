"""FP4 experts with several rows an expert: W [BN, BK] times x^T [BK, 16] in bfloat16.

A code becomes a bfloat16 by moving bits: its three magnitude bits go to bits 6 to 8, its sign to
bit 15, which is the value times 2^-126. The block scale times 2^119 is exact in bfloat16 too (below
2^9, which loaders check), and a product of both has at most six significant bits, so nothing rounds
before the sum; the float32 sum takes the matrix's own scale times 2^7. Low and high nibbles are
even and odd columns, which go into two products, so nothing is interleaved.

The operands' trip through shared memory makes it 4.7 to 5.4 times the time of the bytes at any
number of rows (gpu_operators.json), so it is for passes of more than 64 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.moe.pack.triton import Blocks, block_members
from flare_ray.device.ops.swiglu.triton import gated


class Matrices(NamedTuple):
    """codes [E, N, K / 2] uint8 and scales of one product of every expert; factors [E, 3] float32,
    unused where the scales are exponents (`powers`, MXFP4)."""

    codes: Tensor
    scales: Tensor
    factors: Tensor
    powers: bool


@triton.jit
def matrix_scale(factor, place, by, POWERS: tl.constexpr):
    """A matrix's own scale times a number; MXFP4 has none."""
    return tl.full((), 1.0, tl.float32) * by if POWERS else tl.load(factor + place) * by


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
    POWERS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """total += W x^T over the bytes from `start` on of the matrix rows `line` [BN]."""
    byte = start + tl.arange(0, BH)
    mask = inside[:, None] & (byte < width // 2)[None, :]
    packed = tl.load(codes + line[:, None] * (width // 2) + byte[None, :], mask=mask, other=0)
    packed = packed.to(tl.int16)
    SHARING: tl.constexpr = 16 if POWERS else 8
    group = start // SHARING + tl.arange(0, BH // SHARING)
    groups = width // (2 * SHARING)
    there = inside[:, None] & (group < groups)[None, :]
    at = line[:, None] * groups + group[None, :]
    if POWERS:
        exponent = tl.load(scales + at, mask=there, other=0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.where(there, tl.load(scales + at, mask=there).to(tl.float32), 0.0)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, BH // SHARING, SHARING)), (BN, BH))
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
    POWERS: tl.constexpr,
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
        gate = _step(
            gate, codes, scales, line, even, odd, start, hidden, n < width, BN, BH, POWERS, EXACT
        )
        other = line + width
        up = _step(
            up, codes, scales, other, even, odd, start, hidden, n < width, BN, BH, POWERS, EXACT
        )
    gate = gate * matrix_scale(factor, e * 3, 128.0, POWERS)
    up = up * matrix_scale(factor, e * 3 + 1, 128.0, POWERS)
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
    POWERS: tl.constexpr,
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
            total, codes, scales, line, even, odd, start, width, n < hidden, BN, BH, POWERS, EXACT
        )
    total = total * matrix_scale(factor, e * 3 + 2, 128.0, POWERS)
    place = out + member[None, :] * hidden + n[:, None]
    tl.store(place, total, mask=has[None, :] & (n < hidden)[:, None])


def _tiles(dtype: torch.dtype) -> dict[str, int | bool]:
    if dtype == torch.bfloat16:
        return {"BN": 64, "BH": 128, "EXACT": True, "num_warps": 4, "num_stages": 3}
    return {"BN": 64, "BH": 32, "EXACT": False, "num_warps": 4, "num_stages": 1}


def activated(
    x: Tensor, held: Matrices, blocks: Blocks, *, limit: float, dtype: torch.dtype
) -> Tensor:
    """Activated rows [M, I] of every assignment, by gate and up rows of N = 2 I."""
    count, width = blocks.expert.shape[0], held.codes.shape[1] // 2
    out = x.new_empty((count, width), dtype=dtype)
    tiles = _tiles(x.dtype)
    _gate_up[(triton.cdiv(width, tiles["BN"]), count)](
        x.contiguous(),
        held.codes,
        held.scales,
        held.factors,
        blocks.expert,
        blocks.filled,
        blocks.members,
        out,
        x.shape[1],
        width,
        limit,
        TOP_K=count // x.shape[0],
        BLOCK=blocks.block,
        POWERS=held.powers,
        **tiles,
    )
    return out


def lowered(active: Tensor, held: Matrices, blocks: Blocks) -> Tensor:
    """Down products [M, H] float32 of every assignment, N = H."""
    count, width = active.shape
    hidden = held.codes.shape[1]
    out = active.new_empty((count, hidden), dtype=torch.float32)
    tiles = _tiles(active.dtype)
    _down[(triton.cdiv(hidden, tiles["BN"]), count)](
        active,
        held.codes,
        held.scales,
        held.factors,
        blocks.expert,
        blocks.filled,
        blocks.members,
        out,
        hidden,
        width,
        BLOCK=blocks.block,
        POWERS=held.powers,
        **tiles,
    )
    return out

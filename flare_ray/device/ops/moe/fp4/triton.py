"""FP4 experts, packed in memory; the kernels here are those for few rows an expert.

A decode round gives an expert one or two rows, so the work is reading and unpacking weights. The
matrix unit would want each code as a bfloat16 in its own operand layout, a trip through shared
memory that costs more than the reading (wide/triton.py). Here a code becomes a byte, and bytes are
multiplied where they lie:

    u = 12 + 2 v         v in {0, .5, 1, 1.5, 2, 3, 4, 6} and its negatives, so u in 0 .. 24
    sum v x = (sum u x - 12 sum x) / 2         x in 16-bit fixed point (digits/triton.py)

A byte permutation looks four codes up at once: its selector is the packed word itself. Bit 3 of a
selector asks for the looked-up byte's sign instead of the byte, which is 0 for all entries below
128; so one permutation over the bytes of positive values gives 0 for negative codes, one over those
of negative values with bit 3 flipped the reverse, and their union is u. Sums are exact integers of
one word of 16, then float32: the word's scale times unit, last the matrix's own scale. NVFP4 has
an E4M3 scale a word, MXFP4 a power of two for two words and no scale of the matrix (POWERS).

grid (tiles of BN outputs, blocks); a program holds its tile's whole rows (K / 16 words of 64 bits a
row) in registers and runs the block's rows over them, so weights are read once whatever the rows.
The sum over K meets in one reduction at the end. One output of gate and up with two warps and
eight of down with four were the fastest of 1 to 16 with one to eight warps at 1 to 64 rows, tried
by hand (NVFP4).

Source: the layouts are published NVFP4 and MXFP4; the lookup and the offset are ours.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.moe.fp4.digits.triton import digits
from flare_ray.device.ops.moe.fp4.wide import triton as wide
from flare_ray.device.ops.moe.fp4.wide.triton import matrix_scale
from flare_ray.device.ops.moe.pack.triton import Blocks, pack
from flare_ray.device.ops.moe.packed import Fp4Stack, Mxfp4Stack
from flare_ray.device.ops.moe.reference import Rounding
from flare_ray.device.ops.moe.triton import BLOCK, combine
from flare_ray.device.ops.swiglu.triton import gated

FEW_ROWS = 64
"""Most rows of a pass for these kernels. NVFP4, 288 experts, eight a row: 54, 338, 1,260, 2,411 us
at 1, 8, 32, 64 rows (2.1, 1.8, 2.3, 3.0 times the time of the bytes); the matrix unit's form
(wide/triton.py) takes 140, 906, 2,683, 3,681 us and wins from 128 rows on (4,350 against 4,577)."""

GATE_TILE, GATE_WARPS = 1, 2
DOWN_TILE, DOWN_WARPS = 8, 4
"""Outputs and warps of a program; a row of K = 4,096 is 256 words of 64 bits."""

_COMPILED = os.environ.get("TRITON_INTERPRET", "0") != "1"
"""The interpreter knows no inline assembly; it takes the sum's plain form."""

_FOUR = """
    prmt.b32 u, 0x0f0e0d0c, 0x18141210, {word};
    prmt.b32 v, 0x090a0b0c, 0x00040608, {flip};
    or.b32 u, u, v;
    dp4a.u32.s32 hi, u, {high}, hi;
    dp4a.u32.u32 lo, u, {low}, lo;
"""
_SIXTEEN = tl.constexpr(
    "{ .reg .b32 a, b, s, t, u, v, hi, lo;\n mov.b32 hi, 0; mov.b32 lo, 0;\n mov.b64 {a, b}, $1;\n"
    "xor.b32 s, a, 0x88888888; xor.b32 t, b, 0x88888888;\n"
    + _FOUR.format(word="a", flip="s", high="$2", low="$6")
    + "shr.b32 a, a, 16; shr.b32 s, s, 16;\n"
    + _FOUR.format(word="a", flip="s", high="$3", low="$7")
    + _FOUR.format(word="b", flip="t", high="$4", low="$8")
    + "shr.b32 b, b, 16; shr.b32 t, t, 16;\n"
    + _FOUR.format(word="b", flip="t", high="$5", low="$9")
    + "shl.b32 hi, hi, 8; add.s32 $0, hi, lo; }"
)


@triton.jit
def _plain_sum(word, h0, h1, h2, h3, l0, l1, l2, l3):
    """What the assembly computes, operation by operation."""
    total = (word * 0).to(tl.int32)
    for i in tl.static_range(16):
        code = ((word >> (4 * i)) & 15).to(tl.int32)
        size = code & 7
        size = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
        byte = 12 + tl.where(code > 7, -size, size)
        if i < 4:
            high, low = h0, l0
        elif i < 8:
            high, low = h1, l1
        elif i < 12:
            high, low = h2, l2
        else:
            high, low = h3, l3
        digit = (high << (24 - 8 * (i % 4))) >> 24
        total += byte * (digit * 256 + ((low >> (8 * (i % 4))) & 255))
    return total


@triton.jit
def _group_sums(word, h0, h1, h2, h3, l0, l1, l2, l3, COMPILED: tl.constexpr):
    """[BN, G] int64 words of 16 codes, [1, G] digits -> [BN, G] int32 sums of u x."""
    if COMPILED:
        sums = tl.inline_asm_elementwise(
            _SIXTEEN,
            "=r,l,r,r,r,r,r,r,r,r",
            [word, h0, h1, h2, h3, l0, l1, l2, l3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        sums = _plain_sum(word, h0, h1, h2, h3, l0, l1, l2, l3)
    return sums


@triton.jit
def _row(line, groups, group, inside):
    """The ten planes [G] of the row whose digits start at `line`."""
    h0 = tl.load(line + group, mask=inside, other=0)
    h1 = tl.load(line + groups + group, mask=inside, other=0)
    h2 = tl.load(line + 2 * groups + group, mask=inside, other=0)
    h3 = tl.load(line + 3 * groups + group, mask=inside, other=0)
    l0 = tl.load(line + 4 * groups + group, mask=inside, other=0)
    l1 = tl.load(line + 5 * groups + group, mask=inside, other=0)
    l2 = tl.load(line + 6 * groups + group, mask=inside, other=0)
    l3 = tl.load(line + 7 * groups + group, mask=inside, other=0)
    offset = tl.load(line + 8 * groups + group, mask=inside, other=0)
    unit = tl.load(line + 9 * groups + group, mask=inside, other=0).to(tl.float32, bitcast=True)
    return h0, h1, h2, h3, l0, l1, l2, l3, offset, unit


@triton.jit
def _product(word, scale, row, COMPILED: tl.constexpr):
    """[BN] float32 products of a tile with a row, times 2."""
    h0, h1, h2, h3, l0, l1, l2, l3, offset, unit = row
    sums = _group_sums(
        word,
        h0[None, :],
        h1[None, :],
        h2[None, :],
        h3[None, :],
        l0[None, :],
        l1[None, :],
        l2[None, :],
        l3[None, :],
        COMPILED,
    )
    sums = (sums - offset[None, :]).to(tl.float32)
    return tl.sum(sums * scale * unit[None, :], axis=1)


@triton.jit
def _tile(codes, scales, first, n, group, groups, mask, POWERS: tl.constexpr):
    """Words [BN, G] and their scales [BN, G] float32 of the rows first + n of a matrix stack."""
    line = (first + n)[:, None]
    word = tl.load(codes + line * groups + group[None, :], mask=mask, other=0)
    if POWERS:
        at = line * (groups // 2) + (group // 2)[None, :]
        exponent = tl.load(scales + at, mask=mask, other=0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + line * groups + group[None, :], mask=mask).to(tl.float32)
        scale = tl.where(mask, scale, 0.0)
    return word, scale


@triton.jit
def _gate_up(
    digit,
    codes,
    scales,
    factor,
    expert,
    filled,
    members,
    out,
    groups,
    width,
    limit,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    POWERS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """digit [R, 10, groups]; codes [E, 2 width, groups] int64; out [M, width]."""
    block = tl.program_id(1)
    # Asked for together, and the first row before the weights: one wait instead of four.
    e = tl.load(expert + block).to(tl.int64)
    count = tl.load(filled + block)
    member = tl.load(members + block * BLOCK).to(tl.int64)
    if e < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.arange(0, GROUPS)
    inside = group < groups
    mask = (n < width)[:, None] & inside[None, :]
    row = _row(digit + (member // TOP_K) * 10 * groups, groups, group, inside)
    first = e * 2 * width
    gate_word, gate_scale = _tile(codes, scales, first, n, group, groups, mask, POWERS)
    up_word, up_scale = _tile(codes, scales, first + width, n, group, groups, mask, POWERS)
    gate_factor = matrix_scale(factor, e * 3, 0.5, POWERS)
    up_factor = matrix_scale(factor, e * 3 + 1, 0.5, POWERS)
    for place in range(count):
        gate = _product(gate_word, gate_scale, row, COMPILED) * gate_factor
        up = _product(up_word, up_scale, row, COMPILED) * up_factor
        active = gated(gate, up, limit)
        tl.store(out + member * width + n, active.to(out.dtype.element_ty), mask=n < width)
        if place + 1 < count:
            member = tl.load(members + block * BLOCK + place + 1).to(tl.int64)
            row = _row(digit + (member // TOP_K) * 10 * groups, groups, group, inside)


@triton.jit
def _down(
    digit,
    codes,
    scales,
    factor,
    expert,
    filled,
    members,
    out,
    groups,
    hidden,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    POWERS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """digit [M, 10, groups]; codes [E, hidden, groups] int64; out [M, hidden] float32."""
    block = tl.program_id(1)
    # Asked for together, and the first row before the weights: one wait instead of four.
    e = tl.load(expert + block).to(tl.int64)
    count = tl.load(filled + block)
    member = tl.load(members + block * BLOCK).to(tl.int64)
    if e < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.arange(0, GROUPS)
    inside = group < groups
    mask = (n < hidden)[:, None] & inside[None, :]
    row = _row(digit + member * 10 * groups, groups, group, inside)
    word, scale = _tile(codes, scales, e * hidden, n, group, groups, mask, POWERS)
    own = matrix_scale(factor, e * 3 + 2, 0.5, POWERS)
    for place in range(count):
        total = _product(word, scale, row, COMPILED) * own
        tl.store(out + member * hidden + n, total, mask=n < hidden)
        if place + 1 < count:
            member = tl.load(members + block * BLOCK + place + 1).to(tl.int64)
            row = _row(digit + member * 10 * groups, groups, group, inside)


class Fp4Experts:
    """Routed experts of one layer.

    Args:
        stack: kept as it is.
        limit: bound of the activation's inputs.
        few_rows: most rows of a pass for the kernels of few rows.
        rounding: of rows and of weighted activations before their products; None = they stay as
            they are, and outputs are weighted.
    """

    def __init__(
        self,
        stack: Fp4Stack,
        *,
        limit: float,
        few_rows: int = FEW_ROWS,
        rounding: Rounding | None = None,
    ) -> None:
        self._first = (stack.gate_up, stack.gate_up_scale)
        self._second = (stack.down, stack.down_scale)
        # without factors the pointer is read by nobody
        self._factors = stack.gate_up if isinstance(stack, Mxfp4Stack) else stack.multipliers
        self._powers = isinstance(stack, Mxfp4Stack)
        self._limit = limit
        self._few_rows = few_rows
        self._rounding = rounding
        self._width = stack.gate_up.shape[1] // 2
        self._hidden = stack.down.shape[1]

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        """As `api.Experts.__call__`, rows already rounded; `extra` [R, H] is added to the sum."""
        blocks = pack(experts, block=BLOCK)
        few = x.shape[0] <= self._few_rows
        active = (self._activated if few else self._widely_activated)(x, blocks)
        if self._rounding is not None:
            active = self._rounding(active.mul_(weights.reshape(-1, 1))).to(x.dtype)
            weights = torch.ones_like(weights)
        parts = (self._lowered if few else self._widely_lowered)(active, blocks)
        return combine(parts, weights, extra, x.dtype)

    def _activated(self, x: Tensor, blocks: Blocks) -> Tensor:
        count, groups = blocks.expert.shape[0], x.shape[1] // 16
        active = x.new_empty((count, self._width), dtype=self._active_type(x))
        codes, scales = self._first
        _gate_up[(triton.cdiv(self._width, GATE_TILE), count)](
            digits(x),
            codes.view(torch.int64),
            scales,
            self._factors,
            blocks.expert,
            blocks.filled,
            blocks.members,
            active,
            groups,
            self._width,
            self._limit,
            TOP_K=count // x.shape[0],
            BLOCK=BLOCK,
            BN=GATE_TILE,
            GROUPS=triton.next_power_of_2(groups),
            POWERS=self._powers,
            COMPILED=_COMPILED,
            num_warps=GATE_WARPS,
        )
        return active

    def _lowered(self, active: Tensor, blocks: Blocks) -> Tensor:
        count, groups = active.shape[0], self._width // 16
        out = active.new_empty((count, self._hidden), dtype=torch.float32)
        codes, scales = self._second
        _down[(triton.cdiv(self._hidden, DOWN_TILE), count)](
            digits(active),
            codes.view(torch.int64),
            scales,
            self._factors,
            blocks.expert,
            blocks.filled,
            blocks.members,
            out,
            groups,
            self._hidden,
            BLOCK=BLOCK,
            BN=DOWN_TILE,
            GROUPS=triton.next_power_of_2(groups),
            POWERS=self._powers,
            COMPILED=_COMPILED,
            num_warps=DOWN_WARPS,
        )
        return out

    def _widely_activated(self, x: Tensor, blocks: Blocks) -> Tensor:
        held = wide.Matrices(*self._first, self._factors, self._powers)
        return wide.activated(x, held, blocks, limit=self._limit, dtype=self._active_type(x))

    def _widely_lowered(self, active: Tensor, blocks: Blocks) -> Tensor:
        held = wide.Matrices(*self._second, self._factors, self._powers)
        return wide.lowered(active, held, blocks)

    def _active_type(self, x: Tensor) -> torch.dtype:
        """Activations that are weighted and rounded anyway are not rounded before."""
        return x.dtype if self._rounding is None else torch.float32

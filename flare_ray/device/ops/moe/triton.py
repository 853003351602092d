"""Experts of one layer on CUDA, in the matrices' own type (bfloat16, float32).

    pack      blocks of up to 16 assignments of one expert (`pack/triton.py`)
    gate_up   grid (tiles of I, blocks): W [BN, BK] times x^T [BK, 16], so that the weight is the
              large operand of the matrix unit and few rows waste nothing that is read; gate and
              up columns of one place meet in one program, which applies the activation
    down      grid (tiles of H, blocks), float32 outputs per assignment
    combine   grid (rows, slices of H): weighs and adds a row's assignments in order of choice, so
              the sum has one order

One row of eight experts of 4,096 x 2,048 is bound by reading 400 MB of weights. Tiles of 64 x 128,
four warps and four stages take 1.13 times as long as a plain sum of those bytes at one row, and as
long from eight rows on (gpu_operators.json).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.moe.pack.triton import Blocks, block_members, pack
from flare_ray.device.ops.swiglu.triton import gated

BLOCK = 16
"""Assignments of a block: the least that the matrix unit takes."""


@triton.jit
def _gate_up(
    x,
    weight,
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
    BK: tl.constexpr,
):
    """x [R, hidden]; weight [E, 2 width, hidden]; out [M, width]."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    row = member // TOP_K
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < width
    gate = tl.zeros((BN, BLOCK), tl.float32)
    up = tl.zeros((BN, BLOCK), tl.float32)
    first = weight + (e * 2 * width + n[:, None]) * hidden
    for start in range(0, hidden, BK):
        k = start + tl.arange(0, BK)
        mask = inside[:, None] & (k < hidden)[None, :]
        rows = tl.load(
            x + row[None, :] * hidden + k[:, None],
            mask=has[None, :] & (k < hidden)[:, None],
            other=0.0,
        )
        w = tl.load(first + k[None, :], mask=mask, other=0.0)
        gate = tl.dot(w, rows, gate, input_precision="ieee")
        w = tl.load(first + width * hidden + k[None, :], mask=mask, other=0.0)
        up = tl.dot(w, rows, up, input_precision="ieee")
    active = gated(gate, up, limit)
    place = out + member[None, :] * width + n[:, None]
    tl.store(place, active.to(out.dtype.element_ty), mask=has[None, :] & inside[:, None])


@triton.jit
def _down(
    active,
    weight,
    expert,
    filled,
    members,
    out,
    hidden,
    width,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """active [M, width]; weight [E, width, hidden]; out [M, hidden] float32."""
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e < 0:
        return
    has, member = block_members(filled, members, block, BLOCK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < hidden
    total = tl.zeros((BN, BLOCK), tl.float32)
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        rows = tl.load(
            active + member[None, :] * width + k[:, None],
            mask=has[None, :] & (k < width)[:, None],
            other=0.0,
        )
        w = tl.load(
            weight + (e * width + k[:, None]) * hidden + n[None, :],
            mask=(k < width)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(w), rows, total, input_precision="ieee")
    place = out + member[None, :] * hidden + n[:, None]
    tl.store(place, total, mask=has[None, :] & inside[:, None])


@triton.jit
def _combine(
    parts,
    weights,
    extra,
    out,
    hidden,
    TOP_K: tl.constexpr,
    EXTRA: tl.constexpr,
    SLICE: tl.constexpr,
):
    """parts [R, TOP_K, hidden] float32; weights [R, TOP_K]; extra, out [R, hidden]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = place < hidden
    total = tl.zeros((SLICE,), tl.float32)
    for choice in tl.static_range(TOP_K):
        at = row * TOP_K + choice
        part = tl.load(parts + at * hidden + place, mask=inside, other=0.0)
        total += tl.load(weights + at) * part
    if EXTRA:
        total += tl.load(extra + row * hidden + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + place, total.to(out.dtype.element_ty), mask=inside)


def combine(parts: Tensor, weights: Tensor, extra: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weighted sums of a row's assignments.

    Args:
        parts: [M, H] float32.
        weights: [R, K] float32.
        extra: [R, H] added unweighted (shared experts).
        dtype: of the result [R, H].
    """
    rows, top_k = weights.shape
    hidden = parts.shape[1]
    out = parts.new_empty((rows, hidden), dtype=dtype)
    step = 512
    _combine[(rows, triton.cdiv(hidden, step))](
        parts,
        weights.contiguous(),
        parts if extra is None else extra.contiguous(),
        out,
        hidden,
        top_k,
        extra is not None,
        step,
        num_warps=4,
    )
    return out


def _tiles(element_bytes: int) -> dict[str, int]:
    """BN, BK, warps and stages; float32 tiles are half as deep to fit shared memory."""
    deep = 128 if element_bytes == 2 else 32
    return {"BN": 64, "BK": deep, "num_warps": 4, "num_stages": 4 if element_bytes == 2 else 2}


class PlainExperts:
    """Routed and shared experts; shared ones are assignments of weight 1.

    Args:
        gate_up: [E + shared, 2 I, H], gate rows first.
        down: [E + shared, I, H].
        shared: experts at the end that every row takes.
        limit: bound of the activation's inputs.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, *, shared: int, limit: float) -> None:
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()
        self._limit = limit
        total = gate_up.shape[0]
        ids = torch.arange(total - shared, total, device=down.device)
        self._shared = ids.unsqueeze(0) if shared else None
        self._ones = torch.ones((1, shared), dtype=torch.float32, device=down.device)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See `api.Experts.__call__`."""
        if self._shared is not None:
            shape = (x.shape[0], self._shared.shape[1])
            experts = torch.cat((experts, self._shared.expand(shape)), dim=1)
            weights = torch.cat((weights, self._ones.expand(shape)), dim=1)
        x = x.contiguous()
        blocks = pack(experts, block=BLOCK)
        active = self._activated(x, blocks, experts.shape[1])
        return combine(self._lowered(active, blocks), weights, None, x.dtype)

    def _activated(self, x: Tensor, blocks: Blocks, top_k: int) -> Tensor:
        hidden, width = x.shape[1], self._down.shape[1]
        count = blocks.expert.shape[0]
        active = x.new_empty((count, width))
        tiles = _tiles(x.element_size())
        _gate_up[(triton.cdiv(width, tiles["BN"]), count)](
            x,
            self._gate_up,
            blocks.expert,
            blocks.filled,
            blocks.members,
            active,
            hidden,
            width,
            self._limit,
            TOP_K=top_k,
            BLOCK=BLOCK,
            **tiles,
        )
        return active

    def _lowered(self, active: Tensor, blocks: Blocks) -> Tensor:
        count, width = active.shape
        hidden = self._down.shape[2]
        out = active.new_empty((count, hidden), dtype=torch.float32)
        tiles = _tiles(active.element_size())
        _down[(triton.cdiv(hidden, tiles["BN"]), count)](
            active,
            self._down,
            blocks.expert,
            blocks.filled,
            blocks.members,
            out,
            hidden,
            width,
            BLOCK=BLOCK,
            **tiles,
        )
        return out

"""Routing pack on the device: no sort, no host, one launch of fixed size.

Assignment m = row * top_k + choice. Assignments of one expert are numbered in order; those numbered
0, BLOCK, 2 BLOCK, ... lead a block of up to BLOCK of them. So block m exists iff assignment m
leads, the capacity is the number of assignments whatever the routing, and a grouped product runs a
grid over all of them in which blocks without an expert exit at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(slots=True)
class Blocks:
    """expert [M] int32, -1 = no block; filled [M] int32 and members [M, BLOCK] int32: a block's
    assignments, undefined behind the filled ones and where there is no block."""

    expert: Tensor
    filled: Tensor
    members: Tensor
    block: int


@triton.jit
def _pack(chosen, expert, filled, members, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """chosen [count] int64."""
    me = tl.program_id(0)
    place = tl.arange(0, COUNT)
    ids = tl.load(chosen + place, mask=place < count, other=-1).to(tl.int32)
    mine = tl.load(chosen + me).to(tl.int32)
    same = ids == mine
    number = tl.sum((same & (place < me)).to(tl.int32), axis=0)
    leads = number % BLOCK == 0
    tl.store(expert + me, tl.where(leads, mine, -1))
    if leads:
        order = tl.cumsum(same.to(tl.int32), axis=0) - 1 - number
        taken = same & (order >= 0) & (order < BLOCK)
        tl.store(filled + me, tl.sum(taken.to(tl.int32), axis=0))
        tl.store(members + me * BLOCK + order, place, mask=taken)


@triton.jit
def block_members(filled, members, block, BLOCK: tl.constexpr):
    """Which of a block's places are filled, and their assignments in int64, 0 in the others."""
    slot = tl.arange(0, BLOCK)
    has = slot < tl.load(filled + block)
    return has, tl.load(members + block * BLOCK + slot, mask=has, other=0).to(tl.int64)


def pack(chosen: Tensor, *, block: int) -> Blocks:
    """Blocks of a routing.

    Args:
        chosen: [R, K] int64 experts.
        block: most assignments of a block.
    """
    count = chosen.numel()
    expert, filled = (chosen.new_empty((count,), dtype=torch.int32) for _ in range(2))
    members = chosen.new_empty((count, block), dtype=torch.int32)
    width = max(16, triton.next_power_of_2(count))
    _pack[(count,)](chosen.contiguous(), expert, filled, members, count, width, block, num_warps=4)
    return Blocks(expert, filled, members, block)

"""Rows in fixed point: a group of 16 channels shares a power of two, each channel is an int16 cut
into two byte digits, which is what the integer dot product of four bytes (dp4a) takes.

The largest magnitude of a group gets 15 bits, so a bfloat16 value within seven binades of it is
exact and a smaller one is off by at most 2^-16 of the group's largest: a hundredth of what rounding
the product to bfloat16 costs.

    digits [R, 10, G] int32, G = H / 16; word w of a group holds channels 4 w .. 4 w + 3
        0 .. 3   high digits, signed bytes
        4 .. 7   low digits, unsigned bytes
        8        12 times the sum of the group's integers (see fp4/triton.py)
        9        the group's unit, float32 bits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 16
PLANES = 10


@triton.jit
def _digits(x, out, width, groups, SLICE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = group < groups
    place = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(x + row * width + place, mask=inside[:, None], other=0.0).to(tl.float32)
    highest = tl.max(tl.abs(values), axis=1)
    exponent = tl.maximum((highest.to(tl.int32, bitcast=True) >> 23) & 255, 30)
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = values * inverse[:, None]
    whole = (scaled + tl.where(scaled < 0, -0.5, 0.5)).to(tl.int32)
    whole = tl.minimum(tl.maximum(whole, -32768), 32767)
    base = out + row * 10 * groups + group
    tl.store(base + 8 * groups, 12 * tl.sum(whole, axis=1), mask=inside)
    tl.store(base + 9 * groups, unit.to(tl.int32, bitcast=True), mask=inside)
    bytes_of = tl.reshape(whole, (SLICE, 4, 4))
    shift = (tl.arange(0, 4) * 8)[None, None, :]
    high = tl.sum(((bytes_of >> 8) & 255) << shift, axis=2)
    low = tl.sum((bytes_of & 255) << shift, axis=2)
    word = tl.arange(0, 4)
    place = base[:, None] + word[None, :] * groups
    tl.store(place, high, mask=inside[:, None])
    tl.store(place + 4 * groups, low, mask=inside[:, None])


def digits(x: Tensor) -> Tensor:
    """Rows [R, H], H a multiple of 16 -> [R, 10, H / 16] int32."""
    rows, width = x.shape
    groups = width // GROUP
    out = x.new_empty((rows, PLANES, groups), dtype=torch.int32)
    step = 64
    _digits[(rows, triton.cdiv(groups, step))](
        x.contiguous(), out, width, groups, step, num_warps=4
    )
    return out

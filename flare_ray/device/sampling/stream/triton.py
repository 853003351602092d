"""Philox4x32-10 on CUDA: the words of `philox.py` bit for bit, one launch for all lanes.

grid (lanes,). Draw n is word n % 4 of block n // 4, so a lane makes every block its draws touch and
each draw picks its word. The torch form takes some hundred launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _uniforms(keys, offsets, out, count, SIZE: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + lane)
    draw = tl.load(offsets + lane) + tl.arange(0, SIZE)
    block = draw >> 2
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 & 0
    c3 = c0 & 0
    for _ in tl.static_range(10):
        one = c0.to(tl.uint64) * 0xD2511F53
        two = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (two >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = two.to(tl.uint32)
        c2 = (one >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = one.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    place = draw & 3
    word = tl.where(place == 0, c0, tl.where(place == 1, c1, tl.where(place == 2, c2, c3)))
    value = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    number = tl.arange(0, SIZE)
    tl.store(out + lane * count + number, value, mask=number < count)


def uniforms(keys: Tensor, offsets: Tensor, count: int) -> Tensor:
    """See `philox.uniforms`."""
    lanes = keys.shape[0]
    out = torch.empty((lanes, count), dtype=torch.float32, device=keys.device)
    size = triton.next_power_of_2(count)
    _uniforms[(lanes,)](keys.contiguous(), offsets.contiguous(), out, count, size, num_warps=1)
    return out

"""The `count` best of a row's visible pools on CUDA, equal scores to the lower pool.

grid (rows,): a float's bits, with its sign folded in, order like the float, so four passes over the
row find the boundary score exactly, 8 bits at a time, by counting. Counts are integers, so nothing
depends on an order. A last pass writes what lies above the boundary and, by number, as many equal
ones as are still missing; the list is in order of pool, which attention does not care about.

A sort of 16,384 scores is a dozen launches; this is one program that reads them five times from the
cache. Rows of a million tokens (262,144 pools) would deserve several programs a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048


@triton.jit
def _ordered(score):
    """float32 -> int64 that orders alike, 0 .. 2 ** 32 - 1."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 ties with 0
    bits = score.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _select(scores, visible, out, pools, count, CHUNK: tl.constexpr):
    """scores [R, pools]; visible [R] int64; out [R, count] int64."""
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), pools).to(tl.int32)
    wanted = tl.minimum(count, seen)
    line = scores + row * pools
    digit = tl.arange(0, 256)
    prefix = wanted.to(tl.int64) * 0
    above = wanted * 0
    for step in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, seen, CHUNK):
            place = start + tl.arange(0, CHUNK)
            key = _ordered(tl.load(line + place, mask=place < seen, other=0.0))
            mine = (place < seen) & ((key >> (32 - 8 * step)) == prefix)
            counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=mine)
        below = tl.cumsum(counts, axis=0)
        reached = above + tl.sum(counts, axis=0) - below + counts
        chosen = tl.maximum(tl.sum((reached >= wanted).to(tl.int32), axis=0) - 1, 0)
        above = tl.sum(tl.where(digit == chosen, reached - counts, 0), axis=0)
        prefix = prefix * 256 + chosen
    room = wanted - above
    written = wanted * 0
    equal = wanted * 0
    for start in range(0, seen, CHUNK):
        place = start + tl.arange(0, CHUNK)
        key = _ordered(tl.load(line + place, mask=place < seen, other=0.0))
        same = (place < seen) & (key == prefix)
        order = equal + tl.cumsum(same.to(tl.int32), axis=0)
        taken = ((place < seen) & (key > prefix)) | (same & (order <= room))
        target = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(out + row * count + target, place.to(tl.int64), mask=taken & (target < count))
        written += tl.sum(taken.to(tl.int32), axis=0)
        equal += tl.sum(same.to(tl.int32), axis=0)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        none = tl.full((CHUNK,), -1, tl.int64)
        tl.store(out + row * count + place, none, mask=(place >= wanted) & (place < count))


def best_pools(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    """As `api.best_pools`, in order of pool."""
    pools = scores.shape[-1]
    count = min(count, pools)
    flat = scores.reshape(-1, pools).contiguous()
    out = torch.empty((flat.shape[0], count), dtype=torch.int64, device=scores.device)
    rows = visible.reshape(-1).contiguous()
    _select[(flat.shape[0],)](flat, rows, out, pools, count, CHUNK=_CHUNK, num_warps=8)
    return out.view(*scores.shape[:-1], count)

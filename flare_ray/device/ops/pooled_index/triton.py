"""Scores of pooled keys on CUDA: grid (rows, tiles of pools).

A program multiplies its row's heads [heads, D] by a tile of keys [D, 64], and weighs and adds the
heads' positive parts in registers, so the products [heads, P] are never stored: 32 times what the
scores take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64


@triton.jit
def _scores(
    query,
    keys,
    weights,
    out,
    width,
    pools,
    scale,
    HEADS: tl.constexpr,
    REAL: tl.constexpr,
    DIM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """query [B T, REAL, DIM]; keys [B, pools, DIM]; weights [B T, REAL]; out [B T, pools]."""
    row = tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, DIM)
    q = tl.load(
        query + (row * REAL + head[:, None]) * DIM + channel[None, :],
        mask=(head < REAL)[:, None],
        other=0.0,
    )
    k = tl.load(
        keys + ((row // width) * pools + pool[None, :]) * DIM + channel[:, None],
        mask=(pool < pools)[None, :],
        other=0.0,
    )
    products = tl.maximum(tl.dot(q, k, input_precision="ieee") * scale, 0.0)
    if WEIGHTED:
        weight = tl.load(weights + row * REAL + head, mask=head < REAL, other=0.0).to(tl.float32)
        products = products * (weight * (REAL**-0.5))[:, None]
    tl.store(out + row * pools + pool, tl.sum(products, axis=0), mask=pool < pools)


def fits(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernel takes such operands: one type, 16 to 256 channels, a power of two."""
    dim = keys.shape[-1]
    return query.dtype == keys.dtype and 16 <= dim <= 256 and dim & (dim - 1) == 0


def pool_scores(query: Tensor, keys: Tensor, weights: Tensor | None) -> Tensor:
    """See `api.pool_scores`."""
    batch, width, heads, dim = query.shape
    pools = keys.shape[1]
    query, keys = query.contiguous(), keys.contiguous()
    out = query.new_empty((batch, width, pools), dtype=torch.float32)
    _scores[(batch * width, triton.cdiv(pools, _TILE))](
        query,
        keys,
        query if weights is None else weights.contiguous(),
        out,
        width,
        pools,
        dim**-0.5,
        HEADS=max(16, triton.next_power_of_2(heads)),
        REAL=heads,
        DIM=dim,
        WEIGHTED=weights is not None,
        TILE=_TILE,
        num_warps=4,
    )
    return out

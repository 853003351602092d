"""Attention over latent rows that are key and value at once (multi-query, no positions).

Two forms of one result: over a list of rows per query, and over every row of a lane up to the
query's position, for contexts so short that selection keeps everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.indexed_attention import reference

LISTED_ROWS = 256
"""Most rows B * T that CUDA attends to by lists of their own; a prefill's rows share theirs, and
dense products read the latents once for all of them. A guess."""


def indexed_attention(query: Tensor, cache: Tensor, index: Tensor, *, scale: float) -> Tensor:
    """Attend to listed rows.

    Args:
        query: [R, H, D].
        cache: [M, D].
        index: [R, N] int64 rows of the cache, -1 = hidden. Whatever hidden or unlisted rows hold
            does not matter, infinities included.
        scale: factor on the products.
    Returns:
        [R, H, D]; 0 where every entry is hidden.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("query", query, index.shape[0], None, cache.shape[1])
    if _compiles(query, cache):
        from flare_ray.device.ops.indexed_attention import numba

        return numba.indexed_attention(query, cache, index, scale=scale)
    if _runs_on_cuda(query, cache):
        from flare_ray.device.ops.indexed_attention import triton

        return triton.indexed_attention(query, cache, index, scale=scale)
    return reference.indexed_attention(query, cache, index, scale=scale)


def causal_attention(
    query: Tensor, cache: Tensor, read: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """Attend to every position of a lane that the bias leaves visible.

    Args:
        query: [B, T, H, D].
        cache: [M, D].
        read: [B * N] int64 rows of the cache in order of position. Every one must hold numbers: a
            caller points positions that do not exist at a row of the same lane that does.
        bias: [B, T, N] of the cache's type, 0 = visible, -inf = hidden.
        scale: factor on the products.
    Returns:
        [B, T, H, D].
    Raises:
        ContractViolation: shapes disagree.
    """
    batch, width, _, dim = query.shape
    expect_shape("bias", bias, batch, width, None)
    expect_shape("cache", cache, None, dim)
    expect_shape("read", read, batch * bias.shape[2])
    if _compiles(query, cache):
        from flare_ray.device.ops.indexed_attention import numba

        return numba.causal_attention(query, cache, read, bias, scale=scale)
    if batch * width <= LISTED_ROWS and _runs_on_cuda(query, cache):
        from flare_ray.device.ops.indexed_attention import triton

        listed = torch.where(bias < 0, -1, read.view(batch, 1, -1)).flatten(0, 1)
        attended = triton.indexed_attention(query.flatten(0, 1), cache, listed, scale=scale)
        return attended.unflatten(0, (batch, width))
    taken = cache.index_select(0, read).view(batch, bias.shape[2], dim)
    return reference.causal_attention(query, taken, bias, scale=scale)


def _runs_on_cuda(query: Tensor, cache: Tensor) -> bool:
    """Whether the CUDA kernels apply; latents of other sizes take the torch form."""
    if not cache.is_cuda:
        return False
    from flare_ray.device.ops.indexed_attention import triton

    return triton.fits(query, cache)


def _compiles(query: Tensor, cache: Tensor) -> bool:
    """Whether the compiled form applies: float32 on CPU, heads and channels in whole
    groups. It reads rows where they lie; gathering 2,051 listed rows a query takes three times as
    long."""
    if cache.device.type != "cpu" or not cache.dtype == query.dtype == torch.float32:
        return False
    from flare_ray.device.ops.indexed_attention import numba

    return numba.fits(cache.shape[1], query.shape[-2])

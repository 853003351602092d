"""Attention of query heads that share key and value heads, over cached rows.

Two forms of one result: over a list of rows per query, and over every row of a lane up to the
query's position, for contexts so short that selection keeps everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.grouped_attention import reference
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class KeyValues:
    """keys, values [M, Hk, D]: a cache, or rows taken from it."""

    keys: Tensor
    values: Tensor


def indexed_attention(query: Tensor, cache: KeyValues, index: Tensor, *, scale: float) -> Tensor:
    """Attend to listed rows.

    Args:
        query: [R, H, D], H a multiple of Hk; neighbouring heads share a key head.
        cache: of M rows.
        index: [R, N] int64 rows of the cache, -1 = hidden. Whatever hidden or unlisted rows hold
            does not matter, infinities included.
        scale: factor on the products.
    Returns:
        [R, H, D]; 0 where every entry is hidden.
    Raises:
        ContractViolation: shapes disagree.
    """
    _check(query, cache)
    expect_shape("index", index, query.shape[0], None)
    return reference.indexed_attention(query, cache.keys, cache.values, index, scale=scale)


def causal_attention(
    query: Tensor, cache: KeyValues, read: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """Attend to every position of a lane that the bias leaves visible.

    Args:
        query: [B, T, H, D], H a multiple of Hk.
        cache: of M rows.
        read: [B * N] int64 rows of the cache in order of position. Every one must hold numbers: a
            caller points positions that do not exist at a row of the same lane that does.
        bias: [B, T, N] of the cache's type, 0 = visible, -inf = hidden.
        scale: factor on the products.
    Returns:
        [B, T, H, D].
    Raises:
        ContractViolation: shapes disagree.
    """
    batch, width, _, _ = query.shape
    _check(query, cache)
    expect_shape("bias", bias, batch, width, None)
    expect_shape("read", read, batch * bias.shape[2])
    keys, values = (
        rows.index_select(0, read).unflatten(0, (batch, -1)) for rows in (cache.keys, cache.values)
    )
    return reference.causal_attention(query, keys, values, bias, scale=scale)


def _check(query: Tensor, cache: KeyValues) -> None:
    expect_shape("keys", cache.keys, None, None, query.shape[-1])
    expect_shape("values", cache.values, *cache.keys.shape)
    heads, shared = query.shape[-2], cache.keys.shape[1]
    if heads % shared:
        raise ContractViolation(f"{heads} query heads cannot share {shared} key heads equally")

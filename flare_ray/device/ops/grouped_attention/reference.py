"""Gather, softmax, weighted sum; long row lists in blocks of bounded size."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 23
"""Largest intermediate, in elements: 32 MiB of float32."""


def indexed_attention(
    query: Tensor, keys: Tensor, values: Tensor, index: Tensor, *, scale: float
) -> Tensor:
    """See `api.indexed_attention`."""
    step = max(1, BLOCK_ELEMENTS // (index.shape[1] * keys[0].numel()))
    blocks = [
        _indexed_block(query[at : at + step], keys, values, index[at : at + step], scale)
        for at in range(0, query.shape[0], step)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _indexed_block(
    query: Tensor, keys: Tensor, values: Tensor, index: Tensor, scale: float
) -> Tensor:
    rows, count = index.shape
    heads, dim = keys.shape[1:]
    hidden = index < 0
    flat = index.clamp(min=0).view(-1)

    def taken(cache: Tensor) -> Tensor:
        """[rows, heads, count, dim]; weight 0 times a stale infinity would be NaN, so hidden
        entries hold zeros."""
        picked = cache.index_select(0, flat).view(rows, count, heads, dim)
        return picked.masked_fill_(hidden.view(rows, count, 1, 1), 0.0).transpose(1, 2)

    shared = query.view(rows, heads, -1, dim)
    scores = (shared @ taken(keys).transpose(2, 3)).to(torch.float32).mul_(scale)
    mask = hidden.view(rows, 1, 1, count)
    weights = torch.softmax(scores.masked_fill_(mask, float("-inf")), dim=-1)
    # a row with every entry hidden has no weights at all and attends to nothing
    weights.masked_fill_(mask, 0.0)
    return (weights.to(query.dtype) @ taken(values)).view(rows, -1, dim)


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """See `api.causal_attention`; keys, values [B, N, Hk, D] are the lanes' gathered rows."""
    batch, width, total, dim = query.shape
    count, heads = keys.shape[1:3]
    step = max(1, BLOCK_ELEMENTS // (batch * total * count))
    keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
    blocks = []
    for at in range(0, width, step):
        part = query[:, at : at + step]
        rows = part.shape[1]
        shared = part.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        scores = (shared @ keys).to(torch.float32).mul_(scale)
        shift = bias[:, at : at + rows].unsqueeze(1).unsqueeze(3)
        scores = scores.view(batch, heads, rows, -1, count).add_(shift).flatten(2, 3)
        mixed = torch.softmax(scores, dim=-1).to(values.dtype) @ values
        blocks.append(mixed.view(batch, heads, rows, -1, dim).transpose(1, 2).flatten(2, 3))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

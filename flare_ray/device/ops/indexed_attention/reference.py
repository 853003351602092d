"""Gather, softmax, weighted sum; long row lists in blocks of bounded size."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 23
"""Largest intermediate, in elements: 32 MiB of float32."""


def indexed_attention(query: Tensor, cache: Tensor, index: Tensor, *, scale: float) -> Tensor:
    """See `api.indexed_attention`."""
    rows = query.shape[0]
    step = max(1, BLOCK_ELEMENTS // (index.shape[1] * cache.shape[1]))
    blocks = [
        _indexed_block(query[at : at + step], cache, index[at : at + step], scale)
        for at in range(0, rows, step)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _indexed_block(query: Tensor, cache: Tensor, index: Tensor, scale: float) -> Tensor:
    rows, count = index.shape
    hidden = index < 0
    taken = cache.index_select(0, index.clamp(min=0).view(-1)).view(rows, count, -1)
    # Weight 0 times a stale infinity would be NaN: hidden entries must hold numbers.
    taken.masked_fill_(hidden.unsqueeze(-1), 0.0)
    scores = torch.bmm(query, taken.transpose(1, 2)).to(torch.float32).mul_(scale)
    scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    # a row with every entry hidden has no weights at all and attends to nothing
    weights.masked_fill_(hidden.unsqueeze(1), 0.0)
    return torch.bmm(weights.to(taken.dtype), taken)


def causal_attention(query: Tensor, taken: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """See `api.causal_attention`; `taken` [B, N, D] are the lanes' gathered rows."""
    batch, width, heads, dim = query.shape
    step = max(1, BLOCK_ELEMENTS // (batch * heads * taken.shape[1]))
    keys = taken.transpose(1, 2)
    blocks = []
    for at in range(0, width, step):
        part = query[:, at : at + step]
        rows = part.shape[1]
        shift = bias[:, at : at + step].unsqueeze(2).expand(batch, rows, heads, -1)
        scores = torch.baddbmm(
            shift.reshape(batch, rows * heads, -1),
            part.reshape(batch, rows * heads, dim).to(taken.dtype),
            keys,
            alpha=scale,
        )
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(taken.dtype)
        blocks.append(torch.bmm(weights, taken).view(batch, rows, heads, dim))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

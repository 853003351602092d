"""Pooling, scoring and selection in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_keys(rows: Tensor, ape: Tensor) -> Tensor:
    """See `api.pool_keys`."""
    keys, gates = rows.unbind(2)
    weights = torch.softmax(gates.to(torch.float32) + ape, dim=1)
    return (weights.mul_(keys)).sum(1).to(rows.dtype)


def pool_scores(query: Tensor, keys: Tensor, weights: Tensor | None) -> Tensor:
    """See `api.pool_scores`."""
    batch, width, heads, dim = query.shape
    query = query.reshape(batch, width * heads, dim).to(torch.float32)
    products = torch.bmm(query, keys.to(torch.float32).transpose(1, 2))
    products = F.relu(products.mul_(dim**-0.5), inplace=True)
    if weights is None:
        return products.view(batch, width, heads, keys.shape[1]).sum(2)
    products = products.view(batch * width, heads, keys.shape[1])
    scale = heads**-0.5
    weighted = torch.bmm(weights.view(batch * width, 1, heads).to(torch.float32) * scale, products)
    return weighted.view(batch, width, keys.shape[1])


def best_pools(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    """See `api.best_pools`. A stable sort keeps the lower pool first among equal scores."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    hidden = place >= visible.unsqueeze(-1)
    masked = scores.masked_fill(hidden, float("-inf"))
    order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., :count]
    return order.masked_fill(order >= visible.unsqueeze(-1), -1)


def candidate_blocks(scores: Tensor, visible: Tensor, *, count: int, size: int) -> Tensor:
    """See `api.candidate_blocks`."""
    pools = scores.shape[-1]
    place = torch.arange(pools, device=scores.device)
    masked = scores.masked_fill(place >= visible.unsqueeze(-1), float("-inf"))
    padded = F.pad(masked, (0, -pools % size), value=float("-inf"))
    best = padded.unflatten(-1, (-1, size)).amax(-1)
    blocks = torch.arange(best.shape[-1], device=scores.device)
    newest = (visible - 1).unsqueeze(-1) // size
    best = best.masked_fill(blocks == newest, float("inf"))
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices[..., :count]
    taken = torch.zeros(best.shape, dtype=torch.bool, device=best.device)
    taken.scatter_(-1, order, True)
    taken &= blocks <= newest
    return taken.repeat_interleave(size, dim=-1)[..., :pools]


def selected_tokens(pools: Tensor, positions: Tensor, *, pool: int) -> Tensor:
    """See `api.selected_tokens`."""
    inside = torch.arange(pool, device=pools.device)
    tokens = (pools.unsqueeze(-1) * pool + inside).flatten(-2)
    tokens.masked_fill_(tokens < 0, -1)
    if pool == 1:
        return tokens
    end = positions.unsqueeze(-1) + 1
    tail = end - end % pool + inside[: pool - 1]
    return torch.cat((tokens, tail.masked_fill(tail >= end, -1)), dim=-1)

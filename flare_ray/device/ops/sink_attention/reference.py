"""Gather, softmax with one more column, weighted sum; long row lists in blocks of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flare_ray.device.ops.sink_attention.api import Listed

BLOCK_ELEMENTS = 1 << 23
"""Largest intermediate, in elements: 32 MiB of float32."""


def sink_attention(
    query: Tensor, lists: tuple[Listed, ...], sink: Tensor, *, scale: float
) -> Tensor:
    """See `api.sink_attention`."""
    count = sum(listed.index.shape[1] for listed in lists)
    step = max(1, BLOCK_ELEMENTS // (count * query.shape[2]))
    blocks = [
        _block(query, lists, sink, scale, slice(at, at + step))
        for at in range(0, query.shape[0], step)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(
    query: Tensor, lists: tuple[Listed, ...], sink: Tensor, scale: float, part: slice
) -> Tensor:
    index = torch.cat([listed.index[part] for listed in lists], dim=1)
    rows = index.shape[0]
    hidden = index < 0
    taken = torch.cat(
        [
            listed.pool.index_select(0, listed.index[part].clamp(min=0).view(-1)).view(
                rows, listed.index.shape[1], -1
            )
            for listed in lists
        ],
        dim=1,
    )
    # Weight 0 times a stale infinity would be NaN: hidden entries must hold numbers.
    taken.masked_fill_(hidden.unsqueeze(-1), 0.0)
    scores = torch.bmm(query[part], taken.transpose(1, 2)).to(torch.float32).mul_(scale)
    scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    column = sink.view(1, -1, 1).expand(rows, -1, 1)
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights.to(taken.dtype), taken)

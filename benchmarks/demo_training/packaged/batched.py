"""Many requests of a packaged model at once, by key and value caches, on one device.

Every request keeps its own length: rows behind its committed ones are overwritten or masked, so
that nothing has to be cleared between prompts.

Shapes: B requests, W rows of each at a time, P positions of capacity, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Attention, PackagedModel

Cache = tuple[Tensor, Tensor]
"""Keys and values [B, key heads, P, width] of one layer."""


class PackagedSession:
    """Committed state of B requests, as ``generation.Session`` asks; it is of the target's type.

    Args:
        model: its drafter is of the target's type too, where drafts are asked for.
        requests: B.
        positions: P.

    Attributes:
        lengths: [B] committed positions of the target.
        draft_lengths: [B] committed positions of the drafter.
    """

    def __init__(self, model: PackagedModel, requests: int, positions: int) -> None:
        self.model, self.positions = model, positions
        weight = model.embed_tokens.weight
        attention = model.drafter.self_attn
        shape = (requests, attention.key_heads, positions, attention.width)
        self._caches: list[Cache] = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(len(model.layers) + 1)
        ]
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=weight.device)
        self.draft_lengths = torch.zeros_like(self.lengths)

    def verify(self, ids: Tensor) -> Tensor:
        """States [B, W, H] behind the final norm of the next W tokens [B, W]; a graph may record
        it.
        """
        model, x = self.model, self.model.embed_tokens(ids)
        position = self._positions(self.lengths, ids.shape[1])
        turns, hidden = model.turns(position), self._hidden(position)
        for layer, cache in zip(model.blocks, self._caches, strict=False):
            q, k, v = layer.enter(x, turns)
            x = layer.leave(x, _attended(layer.self_attn, q, cache, (k, v), position, hidden))
        out: Tensor = model.norm(x)
        return out

    def commit(self, rows: Tensor, longest: int | None = None) -> None:
        """Keep the first ``rows`` [B] verified rows; ``longest`` is not needed here."""
        self.lengths = self.lengths + rows

    def draft(self, ids: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Drafter rows [B, W, H] of pairs at positions ``start`` [B] onwards."""
        drafter = self.model.drafter
        position = self._positions(start, ids.shape[1])
        x = drafter.joined(self.model.embed_tokens(ids), hidden)
        q, k, v = drafter.enter(x, self.model.turns(position))
        unseen = self._hidden(position)
        mixed = _attended(drafter.self_attn, q, self._caches[-1], (k, v), position, unseen)
        return drafter.state(x, mixed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of states."""
        return self.model.logits(hidden)

    def draft_logits(self, out: Tensor) -> Tensor:
        """Vocabulary logits of drafter rows."""
        return self.model.draft_logits(out)

    def select(self, keep: Tensor) -> None:
        """Keep the requests ``keep`` [K] only; call between rounds."""
        self._caches = [(keys[keep], values[keep]) for keys, values in self._caches]
        self.lengths, self.draft_lengths = self.lengths[keep], self.draft_lengths[keep]

    def _positions(self, start: Tensor, rows: int) -> Tensor:
        return start[:, None] + torch.arange(rows, device=start.device)

    def _hidden(self, position: Tensor) -> Tensor:
        """[B, 1, 1, W, P] entries behind the row's own position."""
        at = torch.arange(self.positions, device=position.device)
        return (at > position[..., None])[:, None, None]


def _attended(
    attention: Attention, q: Tensor, cache: Cache, new: Cache, position: Tensor, hidden: Tensor
) -> Tensor:
    """Writes the new keys and values, and mixes what the rows see: [B, key heads, group, W,
    width].
    """
    at = torch.arange(len(position), device=position.device)[:, None]
    for kept, rows in zip(cache, new, strict=True):
        kept[at, :, position] = rows.transpose(1, 2)
    keys, values = cache
    grouped = q.flatten(2, 3)
    scores = torch.matmul(grouped * attention.width**-0.5, keys.mT).unflatten(2, q.shape[2:4])
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")).float(), -1).to(q.dtype)
    return torch.matmul(weights.flatten(2, 3), values).unflatten(2, q.shape[2:4])

"""Attention of one layer: latest positions beside selected compressed entries.

    qr = norm(x A);   q = rotate(qr B)
    kv = round(rotate(norm(x K)))               the row's own key, and value of all heads
    o  = attend(q; window, entries; sink)       rotated back, then groups of heads through C and D

A full layer also makes entries (`Compressor`) and the index keys that selections score; it and a
reindexing layer select; the others read what stands in `Shared`. Selections are computed whole on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.linear.api import Parts
from flare_ray.device.ops.pooled_index.api import (
    best_pools,
    candidate_blocks,
    pool_keys,
    pool_scores,
)
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.rotary_pairs.api import rotate
from flare_ray.device.ops.sink_attention.api import Listed, sink_attention
from flare_ray.recipes.deepseek_v41.rows import Entries, Ring

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How cached values are rounded; every field the identity where a model was trained without."""

    key: Multiply
    entry: Multiply
    index: Multiply


@dataclass(slots=True)
class Site:
    """One pass as one layer sees it.

    Attributes:
        near: window of the rows.
        phase: [R, n] rotation of the rows.
        entries: of the layer's ratio, with `entry_phase` [R, n]; None without compression.
    """

    near: Ring
    phase: Tensor
    entries: Entries | None = None
    entry_phase: Tensor | None = None
    raw: Ring | None = None


@dataclass(slots=True)
class LayerState:
    """A layer's tensors of the state store; what it does not own is None."""

    window: Tensor
    entries: Tensor | None = None
    index_keys: Tensor | None = None
    raw: Tensor | None = None


@dataclass(slots=True)
class Shared:
    """What sources publish within one pass.

    Attributes:
        entries: [M, D] the last kv source's pool; index_keys: [M, Di] its index keys.
        selected: [R, N] places in `entries`, -1 = none.
        candidates: [B, T, N] bool, entries that later selections may take; None = all.
    """

    entries: Tensor | None = None
    index_keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(slots=True)
class Compressor:
    """Entries and index keys of a kv source.

    Attributes:
        project: rows -> values, and gates behind them where the ratio is above 1.
        norm, key, key_norm: of the latent; index key from the latent before rotation.
    """

    project: Multiply
    norm: RmsNorm
    key: Multiply
    key_norm: RmsNorm
    rounding: Rounding

    def __call__(self, x: Tensor, site: Site, state: LayerState, shared: Shared) -> None:
        """Write the entries that rows [R, H] end, and publish the pools."""
        entries, phase = site.entries, site.entry_phase
        assert entries is not None and phase is not None
        assert state.entries is not None and state.index_keys is not None
        latent = self.norm(self._pooled(x, site, state))
        keys = self.rounding.index(rotate(self.key_norm(self.key(latent)), phase))
        values = self.rounding.entry(rotate(latent, phase))
        shared.entries = state.entries.flatten(0, 1)
        shared.index_keys = state.index_keys.flatten(0, 1)
        shared.entries.index_copy_(0, entries.write, values)
        shared.index_keys.index_copy_(0, entries.write, keys)

    def _pooled(self, x: Tensor, site: Site, state: LayerState) -> Tensor:
        """[R, D] of every row as if it ended an entry."""
        projected = self.project(x)
        if site.raw is None:
            return projected
        assert state.raw is not None
        rows = projected.unflatten(1, (2, -1))
        buffer = site.raw.store(state.raw, rows)
        # a row without a whole group pools itself, harmlessly: its entry goes to the null page
        index = site.raw.index
        own = index[:, :1].clamp(min=0)
        places = torch.where(index < 0, own, index).flip(1)
        group = buffer.index_select(0, places.view(-1)).unflatten(0, places.shape)
        flat = torch.zeros((places.shape[1], rows.shape[2]), device=x.device)
        return pool_keys(group, flat).to(x.dtype)


@dataclass(slots=True)
class Selector:
    """Picks of an index source.

    Attributes:
        query: query latent -> index queries of all heads; weigh: rows -> weight of each head.
        bounds: this source makes the candidates; blocks, size: how many, of how many entries.
    """

    query: Multiply
    weigh: Multiply
    rounding: Rounding
    heads: int
    top_k: int
    bounds: bool
    blocks: int
    size: int

    def __call__(self, x: Tensor, latent: Tensor, site: Site, shared: Shared) -> None:
        """Publish the entries that rows attend to."""
        entries = site.entries
        assert entries is not None and shared.index_keys is not None
        if entries.every is not None:
            shared.selected = entries.every
            return
        batch, width = entries.visible.shape
        query = self.query(latent).unflatten(1, (self.heads, -1))
        query = self.rounding.index(rotate(query, site.phase)).unflatten(0, (batch, width))
        keys = shared.index_keys.index_select(0, entries.read.view(-1))
        keys = keys.unflatten(0, (batch, -1))
        weights = self.weigh(x).unflatten(0, (batch, width))
        scores = pool_scores(query, keys, weights)
        if self.bounds:
            shared.candidates = candidate_blocks(
                scores, entries.visible, count=self.blocks, size=self.size
            )
        elif shared.candidates is not None:
            scores = scores.masked_fill(~shared.candidates, float("-inf"))
        picks = best_pools(scores, entries.visible, count=self.top_k)
        read = entries.read.unsqueeze(1).expand(-1, width, -1)
        places = read.gather(2, picks.clamp(min=0)).masked_fill_(picks < 0, -1)
        shared.selected = places.flatten(0, 1)


@dataclass(slots=True)
class AttentionWeights:
    """This rank's heads and groups.

    Attributes:
        joint: rows -> query latent and raw key side by side, `rank` and D channels.
        query: query latent -> heads * D.
        sink: [heads] float32.
        group: heads * D -> groups * group rank, each group of heads by itself.
        output: groups * group rank -> partial sum [R, H].
    """

    joint: Multiply
    query: Multiply
    query_norm: RmsNorm
    key_norm: RmsNorm
    sink: Tensor
    group: Parts
    output: Multiply


class Attention:
    """One layer's attention; `compressor` and `selector` as its mode says."""

    def __init__(
        self,
        weights: AttentionWeights,
        rounding: Rounding,
        *,
        compressor: Compressor | None = None,
        selector: Selector | None = None,
    ) -> None:
        self._weights = weights
        self._rounding = rounding
        self._compressor = compressor
        self._selector = selector
        self._scale = float(weights.key_norm.size) ** -0.5

    def __call__(self, x: Tensor, site: Site, state: LayerState, shared: Shared) -> Tensor:
        """Run rows [R, H]; this rank's partial sum [R, H]."""
        latent, key = self._latents(x, site.phase)
        if self._compressor is not None:
            self._compressor(x, site, state, shared)
        if self._selector is not None:
            self._selector(x, latent, site, shared)
        lists = [Listed(site.near.store(state.window, key), site.near.index)]
        if site.entries is not None:
            assert shared.entries is not None and shared.selected is not None
            lists.append(Listed(shared.entries, shared.selected))
        return self._attend(latent, site.phase, tuple(lists))

    def block(self, x: Tensor, phase: Tensor, context: Listed, own: Tensor) -> Tensor:
        """Rows of a block that see a context and, in both directions, one another.

        Args:
            own: [R, N] places of every row's block among the rows.
        """
        latent, key = self._latents(x, phase)
        return self._attend(latent, phase, (context, Listed(key, own)))

    def _latents(self, x: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        joint = self._weights.joint(x)
        rank = weights.query_norm.size
        latent = weights.query_norm(joint[:, :rank])
        key = self._rounding.key(rotate(weights.key_norm(joint[:, rank:]), phase))
        return latent, key

    def _attend(self, latent: Tensor, phase: Tensor, lists: tuple[Listed, ...]) -> Tensor:
        weights = self._weights
        query = weights.query(latent).unflatten(1, (weights.sink.shape[0], -1))
        query = rotate(query, phase)
        result = sink_attention(query, lists, weights.sink, scale=self._scale)
        result = rotate(result, phase, back=True).flatten(1)
        return weights.output(weights.group(result))


class ContextKey:
    """A drafter stage's key of a committed row: the window write without attention."""

    def __init__(self, project: Multiply, norm: RmsNorm, rounding: Rounding) -> None:
        self._project = project
        self._norm = norm
        self._rounding = rounding

    def __call__(self, x: Tensor, phase: Tensor) -> Tensor:
        """[R, H] -> [R, D]."""
        return self._rounding.key(rotate(self._norm(self._project(x)), phase))

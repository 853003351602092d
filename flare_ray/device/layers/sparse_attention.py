"""Attention with rotary positions over selected tokens: cache and index writes, selection, gated
output.

Index keys are means over groups of tokens, normalised and rotated as the group's first token; raw
ones wait in a ring until their group is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.rows import (
    IndexLayout,
    PagedRows,
    Span,
    join_ring,
    listed_places,
    paged_rows,
)
from flare_ray.device.ops.grouped_attention.api import (
    KeyValues,
    causal_attention,
    indexed_attention,
)
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.pooled_index.api import best_pools, pool_scores, selected_tokens
from flare_ray.device.ops.rmsnorm.centred import CentredRmsNorm
from flare_ray.device.ops.rotary.api import Rotary, Turns, rotate
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class SparseAttentionWeights:
    """This rank's h query heads and g key heads of d channels; i index heads of D channels.

    Attributes:
        joint: [2 h d + 2 g d + (i + 1) D, H]: queries, output gates, keys, values, index queries,
            index key.
        query_norm / key_norm: over d.
        index_query_norm / index_key_norm: over D.
        output: [H, h d].
        key_heads: g.
    """

    joint: Tensor
    query_norm: CentredRmsNorm
    key_norm: CentredRmsNorm
    index_query_norm: CentredRmsNorm
    index_key_norm: CentredRmsNorm
    output: Tensor
    key_heads: int


@dataclass(slots=True)
class SparseState:
    """Flat views of one layer's state, written in place.

    cache: [M, g, d] keys and values by position; pooled [M / group, D]; tail [(S + 1) * entries,
    D].
    """

    cache: KeyValues
    pooled: Tensor
    tail: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, pooled: Tensor, tail: Tensor) -> SparseState:
        """Views of the state store's [pages, 64, g, d] (two), [pages, 64 / group, D] and [S + 1,
        entries, D]."""
        cache = KeyValues(keys.flatten(0, 1), values.flatten(0, 1))
        return cls(cache, pooled.flatten(0, 1), tail.flatten(0, 1))


@dataclass(slots=True)
class RotatedRows:
    """Indices of a pass, and the turns of its rows and of the groups that it may finish."""

    paged: PagedRows
    turns: Turns
    group_turns: Turns

    def steps(self, count: int) -> list[RotatedRows]:
        """As `PagedRows.steps`."""
        parts = (part.steps(count) for part in (self.paged, self.turns, self.group_turns))
        return [RotatedRows(*pieces) for pieces in zip(*parts, strict=True)]


@dataclass(slots=True)
class RowLayout:
    """What the rows of every layer share: groups and ring, rotation, and the type of a bias."""

    index: IndexLayout
    rotary: Rotary
    dtype: torch.dtype

    def place(self, span: Span, *, null_slot: int, attends: bool = True) -> RotatedRows:
        """Indices and turns of a pass; arguments as of `paged_rows`."""
        paged = paged_rows(span, self.index, null_slot=null_slot, dtype=self.dtype, attends=attends)
        return RotatedRows(
            paged,
            self.rotary.turns(span.positions.reshape(-1)),
            self.rotary.turns(paged.pool_number * self.index.pool),
        )


@dataclass(slots=True)
class _Projected:
    """query [R, h, d] rotated; gate [R, h d] raw; index_query [R, i D] raw."""

    query: Tensor
    gate: Tensor
    index_query: Tensor


class SparseAttentionBlock:
    """Attention of query heads that share key heads, limited to selected tokens.

    Args:
        weights: this rank's part.
        layout: of groups and ring.
    """

    def __init__(self, weights: SparseAttentionWeights, layout: IndexLayout) -> None:
        self._query_norm, self._key_norm = weights.query_norm, weights.key_norm
        self._index_query_norm = weights.index_query_norm
        self._index_key_norm = weights.index_key_norm
        self._layout = layout
        self._joint = Linear(weights.joint)
        self._output = Linear(weights.output)
        dim, index_dim = weights.query_norm.size, weights.index_query_norm.size
        width = weights.output.shape[1]
        keys = weights.key_heads * dim
        index = weights.joint.shape[0] - 2 * width - 2 * keys
        self._dim, self._index_dim = dim, index_dim
        self._parts = [width, width, keys, keys, index - index_dim, index_dim]
        self._scale = dim**-0.5

    def write(self, x: Tensor, rows: RotatedRows, state: SparseState) -> None:
        """Write the rows' keys and values, ring entries and finished groups, and nothing else.

        Args:
            x: [B * T, H].
        """
        self._write(x, rows, state)

    def __call__(self, x: Tensor, rows: RotatedRows, state: SparseState) -> Tensor:
        """Write as `write`, then attend.

        Args:
            x: [B * T, H].
        Returns:
            [B * T, H], this rank's partial sum.
        """
        projected = self._write(x, rows, state)
        paged, query = rows.paged, projected.query
        if paged.read is not None and paged.bias is not None:
            attended = causal_attention(
                query.unflatten(0, (paged.batch, paged.width)),
                state.cache,
                paged.read,
                paged.bias,
                scale=self._scale,
            ).flatten(0, 1)
        else:
            index = self.select(projected.index_query, rows, state.pooled)
            places = listed_places(paged.page_table, index)
            attended = indexed_attention(query, state.cache, places, scale=self._scale)
        return self._output(attended.flatten(1) * torch.sigmoid(projected.gate))

    def select(self, index_query: Tensor, rows: RotatedRows, pooled: Tensor) -> Tensor:
        """Token positions each row attends to, [B, T, N] int64, -1 = none.

        Args:
            index_query: [B * T, i D] raw.
            pooled: [M / group, D].
        """
        paged = rows.paged
        if paged.pool_read is None:
            raise ContractViolation("these rows attend to every position in view, not to selected")
        query = self._by_head(index_query, self._index_query_norm)
        query = rotate(query, rows.turns).unflatten(0, (paged.batch, paged.width))
        keys = pooled.index_select(0, paged.pool_read).view(paged.batch, -1, self._index_dim)
        group = self._layout.pool
        visible = (paged.seen + 1) // group
        scores = pool_scores(query, keys, None)
        groups = best_pools(scores, visible, count=self._layout.top_k // group)
        return selected_tokens(groups, paged.seen, pool=group)

    def _write(self, x: Tensor, rows: RotatedRows, state: SparseState) -> _Projected:
        paged = rows.paged
        query, gate, key, value, index_query, raw = self._joint(x).split(self._parts, dim=1)
        query = rotate(self._by_head(query, self._query_norm), rows.turns)
        key = rotate(self._by_head(key, self._key_norm), rows.turns)
        state.cache.keys.index_copy_(0, paged.latent_write, key)
        value = value.unflatten(1, (-1, self._dim))
        state.cache.values.index_copy_(0, paged.latent_write, value)
        self._finish_groups(raw, rows, state)
        return _Projected(query, gate, index_query)

    def _by_head(self, flat: Tensor, norm: CentredRmsNorm) -> Tensor:
        """[R, heads * d] -> [R, heads, d], every head normalised by itself."""
        rows = norm(flat.reshape(-1, norm.size))
        return rows.view(flat.shape[0], -1, norm.size)

    def _finish_groups(self, raw: Tensor, rows: RotatedRows, state: SparseState) -> None:
        """Groups that these rows complete; what stays goes into the ring."""
        paged = rows.paged
        held = join_ring(raw, paged, state.tail, pool=self._layout.pool)
        mean = held.to(torch.float32).mean(1).to(raw.dtype)
        keys = self._index_key_norm(mean).unsqueeze(1)
        keys = rotate(keys, rows.group_turns).squeeze(1)
        state.pooled.index_copy_(0, paged.pool_write, keys)

"""Latent attention over selected tokens: cache and index writes, selection, absorbed attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.absorbed import AbsorbedOutput, AbsorbedQuery
from flare_ray.device.layers.rows import IndexLayout, PagedRows, join_ring, listed_places
from flare_ray.device.ops.indexed_attention.api import causal_attention, indexed_attention
from flare_ray.device.ops.layer_norm.api import layer_norm
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.pooled_index.api import (
    best_pools,
    pool_keys,
    pool_scores,
    selected_tokens,
)
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.errors import ContractViolation

KEY_NORM_EPS = 1e-6
"""Of the index keys' layer norm; not a setting of the checkpoint."""


@dataclass(slots=True)
class IndexedMlaWeights:
    """This rank's heads h; latent L, query rank Q, index heads i of D channels.

    Attributes:
        joint: [Q + L + 2 D + i, H]: query, latent, index key, pooling gate, index head weights.
        query_norm / latent_norm: over Q and L.
        key_norm: (weight, bias) of the index keys, [D] each.
        ape: [pool, D] float32, pooling bias by place.
        index_query: [i D, Q].
        query / output: absorbed maps.
        scale: of the attention products.
    """

    joint: Tensor
    query_norm: RmsNorm
    latent_norm: RmsNorm
    key_norm: tuple[Tensor, Tensor]
    ape: Tensor
    index_query: Tensor
    query: AbsorbedQuery
    output: AbsorbedOutput
    scale: float


@dataclass(slots=True)
class IndexedState:
    """Flat views of one layer's state, written in place.

    latent [M, L] positions; pooled [M / pool, D]; tail [(S + 1) * entries, 2 D].
    """

    latent: Tensor
    pooled: Tensor
    tail: Tensor

    @classmethod
    def of(cls, latent: Tensor, pooled: Tensor, tail: Tensor) -> IndexedState:
        """Views of the state store's [pages, 64, L], [pages, 64 / pool, D] and [S + 1, entries, 2,
        D]."""
        return cls(latent.flatten(0, 1), pooled.flatten(0, 1), tail.flatten(2).flatten(0, 1))


@dataclass(slots=True)
class _Projected:
    """query [R, Q] raw; head_weights [R, i]."""

    query: Tensor
    head_weights: Tensor


class IndexedMlaBlock:
    """Multi-query attention over latents, limited to selected tokens.

    Args:
        weights: this rank's part.
        layout: of pools and ring.
    """

    def __init__(self, weights: IndexedMlaWeights, layout: IndexLayout) -> None:
        self._query_norm, self._latent_norm = weights.query_norm, weights.latent_norm
        self._key_norm = weights.key_norm
        self._ape = weights.ape
        self._query, self._output = weights.query, weights.output
        self._scale = weights.scale
        self._layout = layout
        self._joint = Linear(weights.joint)
        self._index_query = Linear(weights.index_query)
        self._index_dim = weights.ape.shape[1]
        self._query_rank = weights.query_norm.size
        self._latent = weights.latent_norm.size

    def write(self, x: Tensor, rows: PagedRows, state: IndexedState) -> None:
        """Write the rows' latents, ring entries and finished pools, and nothing else.

        Args:
            x: [B * T, H].
        """
        self._write(x, rows, state)

    def __call__(self, x: Tensor, rows: PagedRows, state: IndexedState) -> Tensor:
        """Write as `write`, then attend.

        Args:
            x: [B * T, H].
        Returns:
            [B * T, H], this rank's partial sum.
        """
        projected = self._write(x, rows, state)
        low_rank = self._query_norm(projected.query)
        query = self._query(low_rank)
        if rows.read is not None and rows.bias is not None:
            attended = causal_attention(
                query.unflatten(0, (rows.batch, rows.width)),
                state.latent,
                rows.read,
                rows.bias,
                scale=self._scale,
            ).flatten(0, 1)
        else:
            index = self.select(low_rank, projected.head_weights, rows, state.pooled)
            attended = indexed_attention(
                query, state.latent, listed_places(rows.page_table, index), scale=self._scale
            )
        return self._output(attended)

    def select(
        self, low_rank: Tensor, head_weights: Tensor, rows: PagedRows, pooled: Tensor
    ) -> Tensor:
        """Token positions each row attends to, [B, T, N] int64, -1 = none.

        Args:
            low_rank: [B * T, Q] normalised.
            head_weights: [B * T, i].
            pooled: [M / pool, D].
        """
        if rows.pool_read is None:
            raise ContractViolation("these rows attend to every position in view, not to selected")
        layout, lanes = self._layout, (rows.batch, rows.width)
        query = self._index_query(low_rank).view(*lanes, -1, self._index_dim)
        keys = pooled.index_select(0, rows.pool_read).view(rows.batch, -1, self._index_dim)
        scores = pool_scores(query, keys, head_weights.reshape(*lanes, -1))
        visible = (rows.seen + 1) // layout.pool
        pools = best_pools(scores, visible, count=layout.top_k // layout.pool)
        return selected_tokens(pools, rows.seen, pool=layout.pool)

    def _write(self, x: Tensor, rows: PagedRows, state: IndexedState) -> _Projected:
        dim = self._index_dim
        rank, end = self._query_rank, self._query_rank + self._latent
        joint = self._joint(x)
        state.latent.index_copy_(0, rows.latent_write, self._latent_norm(joint[:, rank:end]))
        key = layer_norm(joint[:, end : end + dim], *self._key_norm, eps=KEY_NORM_EPS)
        pairs = torch.cat((key, joint[:, end + dim : end + 2 * dim]), dim=1)
        self._finish_pools(pairs, rows, state)
        return _Projected(joint[:, :rank], joint[:, end + 2 * dim :])

    def _finish_pools(self, pairs: Tensor, rows: PagedRows, state: IndexedState) -> None:
        """Pools that these rows complete; what stays goes into the ring."""
        held = join_ring(pairs, rows, state.tail, pool=self._layout.pool)
        keys = pool_keys(held.unflatten(2, (2, self._index_dim)), self._ape)
        state.pooled.index_copy_(0, rows.pool_write, keys)

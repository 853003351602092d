"""Rows that a drafter over pairs projects: norm(embedding of the next token), norm(h)."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.pair_join import reference
from flare_ray.device.ops.rmsnorm.api import RmsNorm


class PairJoin:
    """Looks up, normalises and joins.

    Args:
        table: [V, H] embedding.
        embedding_norm / hidden_norm: over H.
    """

    __slots__ = ("_compiles", "_embedding_norm", "_hidden_norm", "_table")

    def __init__(self, table: Tensor, embedding_norm: RmsNorm, hidden_norm: RmsNorm) -> None:
        expect_shape("table", table, None, embedding_norm.size)
        self._table = table
        self._embedding_norm, self._hidden_norm = embedding_norm, hidden_norm
        same = embedding_norm.eps == hidden_norm.eps
        self._compiles = same and table.device.type == "cpu" and table.dtype == torch.float32

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """[R, 2 H] of the table's type.

        Args:
            tokens / positions: [R] int64; at position 0 the embedding counts as zeros.
            hidden: [R, H] of the table's type.
        """
        if self._compiles:
            from flare_ray.device.ops.pair_join import numba

            weights = (self._embedding_norm.weight, self._hidden_norm.weight)
            eps = self._embedding_norm.eps
            return numba.joined(self._table, tokens, hidden, positions, weights, eps=eps)
        norms = (self._embedding_norm, self._hidden_norm)
        return reference.joined(self._table, tokens, hidden, positions, norms)

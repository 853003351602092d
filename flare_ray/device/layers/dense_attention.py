"""Attention with rotary positions over everything before a row; query heads share key heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flare_ray.device.layers.rows import DenseRows
from flare_ray.device.ops.grouped_attention.api import KeyValues, causal_attention
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.rotary.api import Turns, rotate
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class DenseAttentionWeights:
    """This rank's h query heads and g key heads of d channels.

    Attributes:
        joint: [h d + 2 g d, H]: queries, keys, values.
        output: [H, h d].
        key_heads: g.
        head_dim: d.
    """

    joint: Tensor
    output: Tensor
    key_heads: int
    head_dim: int


@dataclass(slots=True)
class DenseState:
    """Flat view of one layer's state, written in place: [M, g, d] keys and values by position."""

    cache: KeyValues

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> DenseState:
        """Views of the state store's [pages, 64, g, d]."""
        return cls(KeyValues(keys.flatten(0, 1), values.flatten(0, 1)))


@dataclass(slots=True)
class TurnedRows:
    """Indices of a pass and the turns of its rows."""

    dense: DenseRows
    turns: Turns

    def steps(self, count: int) -> list[TurnedRows]:
        """As `DenseRows.steps`."""
        parts = (self.dense.steps(count), self.turns.steps(count))
        return [TurnedRows(*pieces) for pieces in zip(*parts, strict=True)]


class DenseAttentionBlock:
    """Attention of query heads that share key heads.

    Args:
        weights: this rank's part.
    """

    def __init__(self, weights: DenseAttentionWeights) -> None:
        self._joint = Linear(weights.joint)
        self._output = Linear(weights.output)
        keys = weights.key_heads * weights.head_dim
        self._parts = [weights.output.shape[1], keys, keys]
        self._dim = weights.head_dim
        self._scale = weights.head_dim**-0.5

    def write(self, x: Tensor, rows: TurnedRows, state: DenseState) -> None:
        """Write the rows' keys and values, and nothing else.

        Args:
            x: [B * T, H].
        """
        self._write(x, rows, state)

    def __call__(self, x: Tensor, rows: TurnedRows, state: DenseState) -> Tensor:
        """Write as `write`, then attend.

        Args:
            x: [B * T, H].
        Returns:
            [B * T, H], this rank's partial sum.
        Raises:
            ContractViolation: the rows were placed to be written only.
        """
        dense = rows.dense
        if dense.read is None or dense.bias is None:
            raise ContractViolation("these rows only write; place them with attends=True")
        query = self._write(x, rows, state).unflatten(0, (dense.batch, dense.width))
        attended = causal_attention(query, state.cache, dense.read, dense.bias, scale=self._scale)
        return self._output(attended.flatten(0, 1).flatten(1))

    def _write(self, x: Tensor, rows: TurnedRows, state: DenseState) -> Tensor:
        """The rotated queries [B * T, h, d]."""
        query, key, value = (
            part.unflatten(1, (-1, self._dim)) for part in self._joint(x).split(self._parts, dim=1)
        )
        state.cache.keys.index_copy_(0, rows.dense.write, rotate(key, rows.turns))
        state.cache.values.index_copy_(0, rows.dense.write, value)
        return rotate(query, rows.turns)

"""Table rows of the n-grams that end at each token: integer arithmetic, exact on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


class NgramHash:
    """Hashes of the orders 2 .. n.

    Args:
        multipliers: [n] int64, the token itself first.
        primes: [(n - 1) * heads] int64, the heads' row counts, order by order.
        offsets: [(n - 1) * heads] int64, each head's first row.
        reset: token id before which hashing forgets; it also stands for what precedes a text.
    """

    def __init__(self, multipliers: Tensor, primes: Tensor, offsets: Tensor, *, reset: int) -> None:
        expect_shape("offsets", offsets, primes.shape[0])
        self.size = multipliers.shape[0]
        self._multipliers = multipliers
        self._reset = reset
        orders = self.size - 1
        expect_shape("primes", primes.view(orders, -1), orders, None)
        self._primes = primes.view(orders, -1)
        self._offsets = offsets.view(orders, -1)

    def rows(self, joined: Tensor, positions: Tensor) -> Tensor:
        """Rows of every head.

        Args:
            joined: [B, n - 1 + T] int64, n - 1 tokens of history and T new ones; what a history
                entry before the text's start holds does not matter.
            positions: [B, T] int64 of the new tokens.
        Returns:
            [B, T, (n - 1) * heads] int64.
        Raises:
            ContractViolation: shapes disagree.
        """
        batch, width = positions.shape
        expect_shape("joined", joined, batch, self.size - 1 + width)
        mixed = joined[:, self.size - 1 :] * self._multipliers[0]
        orders, forgotten = [], torch.zeros_like(positions, dtype=torch.bool)
        for back in range(1, self.size):
            token = joined[:, self.size - 1 - back : self.size - 1 - back + width]
            forgotten = forgotten | (positions < back)
            token = token.masked_fill(forgotten, self._reset)
            forgotten = token == self._reset
            mixed = mixed ^ (token * self._multipliers[back])
            orders.append(mixed)
        hashed = torch.stack(orders, dim=2).unsqueeze(3)
        return torch.remainder(hashed, self._primes).add_(self._offsets).flatten(2)

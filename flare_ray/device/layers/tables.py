"""Large embedding tables behind one interface, wherever their rows lie (contract: M8)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.recipes.declaration import Communicator


class EmbeddingTable(Protocol):
    """Rows of a table by number."""

    def gather(self, rows: Tensor) -> Tensor:
        """[R, h] int64 row numbers -> [R, h, dim], the same on every rank."""


class DeviceTable:
    """A table in the memory that programs compute in, each shard's rows divided over the ranks.

    Args:
        part: [shards * n, dim], this rank's n rows of every shard, shard by shard.
        shard_rows: rows of a whole shard; n times the number of ranks.
        comm: of the ranks.
    """

    def __init__(self, part: Tensor, *, shard_rows: int, comm: Communicator) -> None:
        expect_shape("part", part, None, None)
        self._part = part
        self._shard_rows = shard_rows
        self._own_rows = shard_rows // comm.size
        self._first = comm.rank * self._own_rows
        self._comm = comm

    def gather(self, rows: Tensor) -> Tensor:
        """See `EmbeddingTable.gather`."""
        if self._comm.size == 1:
            return self._part.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
        within = rows % self._shard_rows - self._first
        shard = (rows - rows % self._shard_rows) // self._comm.size
        other = (within < 0) | (within >= self._own_rows)
        local = (shard + within.clamp(0, self._own_rows - 1)).view(-1)
        taken = self._part.index_select(0, local).view(*rows.shape, -1)
        # One rank brings each row and the others zeros: their sum is that row exactly.
        return self._comm.all_reduce(taken.masked_fill_(other.unsqueeze(-1), 0.0))

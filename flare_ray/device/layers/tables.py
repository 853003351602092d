"""Large embedding tables behind one interface, wherever their rows lie (contract: M8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.row_gather.api import RowGather, scaled
from flare_ray.recipes.declaration import Communicator


class EmbeddingTable(Protocol):
    """Rows of a table by number."""

    def gather(self, rows: Tensor) -> Tensor:
        """[R, h] int64 row numbers -> [R, h, dim], the same on every rank."""


class TableRows(Protocol):
    """This rank's part of a table."""

    def take(self, numbers: Tensor) -> Tensor:
        """Rows [R, D] in the engine's type, of local numbers [R] int64."""


@dataclass(slots=True)
class PlainRows:
    """weight: [N, D] in the engine's type."""

    weight: Tensor

    def take(self, numbers: Tensor) -> Tensor:
        """See `TableRows`."""
        return self.weight.index_select(0, numbers)


@dataclass(slots=True)
class Fp8Rows:
    """Rows in E4M3, dequantised when they are read.

    Attributes:
        weight: [N, D] float8_e4m3fn.
        exponents: [N, D / group] uint8, biased, of the scales of groups of channels; None = there
            are none.
        scale: of the whole table.
        dtype: of what is handed out.
    """

    weight: Tensor
    exponents: Tensor | None
    scale: float
    dtype: torch.dtype

    def take(self, numbers: Tensor) -> Tensor:
        """See `TableRows`."""
        # index_select knows no one-byte floats
        packed = self.weight.view(torch.uint8).index_select(0, numbers)
        values = packed.view(torch.float8_e4m3fn)
        exponents = None if self.exponents is None else self.exponents.index_select(0, numbers)
        return scaled(values, exponents, self.scale, dtype=self.dtype)


@dataclass(slots=True)
class HostRows:
    """Rows in host memory or in mapped files."""

    gather: RowGather

    def take(self, numbers: Tensor) -> Tensor:
        """See `TableRows`."""
        return self.gather(numbers)


class ShardedTable:
    """A table in shards, each shard's rows divided over the ranks.

    Args:
        rows: this rank's n rows of every shard, shard by shard.
        shard_rows: rows of a whole shard; n times the number of ranks.
        comm: of the ranks.
    """

    def __init__(self, rows: TableRows, *, shard_rows: int, comm: Communicator) -> None:
        self._rows = rows
        self._shard_rows = shard_rows
        self._own_rows = shard_rows // comm.size
        self._first = comm.rank * self._own_rows
        self._comm = comm

    def gather(self, rows: Tensor) -> Tensor:
        """See `EmbeddingTable.gather`."""
        if self._comm.size == 1:
            return self._rows.take(rows.reshape(-1)).view(*rows.shape, -1)
        within = rows % self._shard_rows - self._first
        shard = (rows - rows % self._shard_rows) // self._comm.size
        other = (within < 0) | (within >= self._own_rows)
        local = (shard + within.clamp(0, self._own_rows - 1)).view(-1)
        taken = self._rows.take(local).view(*rows.shape, -1)
        # One rank brings each row and the others zeros: their sum is that row exactly.
        return self._comm.all_reduce(taken.masked_fill_(other.unsqueeze(-1), 0.0))


class ColumnTable:
    """A table whose request columns read disjoint runs of rows, divided over the ranks by columns.

    Each rank answers its own columns from its own rows; side by side the answers are the result,
    bit for bit what one rank would read.

    Args:
        rows: this rank's part.
        first_row: number of its first row in the whole table.
        columns: columns of a request, all ranks together.
        comm: of the ranks.
    """

    def __init__(
        self, rows: TableRows, *, first_row: int, columns: int, comm: Communicator
    ) -> None:
        self._rows = rows
        self._first = first_row
        self._columns = columns
        self._comm = comm
        self._each = columns // comm.size
        self._start = comm.rank * self._each

    def gather(self, rows: Tensor) -> Tensor:
        """See `EmbeddingTable.gather`."""
        expect_shape("rows", rows, None, self._columns)
        own = rows[:, self._start : self._start + self._each] - self._first
        taken = self._rows.take(own.reshape(-1)).view(rows.shape[0], -1)
        return self._comm.all_gather(taken).view(*rows.shape, -1)

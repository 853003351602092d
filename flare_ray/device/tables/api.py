"""One interface for tables that are only ever read row by row (contract: M8).

A recipe asks for rows by number and gets them whole on every rank, wherever they lie. The numbers
follow from token ids alone, so a program computes them before its first layer, and a placement with
a longer way to the rows may begin to fetch them there.

Built: rows in device memory, divided over the ranks so that their answers stand side by side; one
all-gather then makes the result, bit for bit what one rank would read. Pinned host memory and disk
are not built.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.tables.rows import TableRows
from flare_ray.recipes.declaration import Communicator


class LookupTable(Protocol):
    """A table of rows."""

    def __call__(self, numbers: Tensor) -> Tensor:
        """Rows side by side, [R, C * D] in the engine's type, of numbers [R, C] int64."""


class ColumnTable:
    """A table whose request columns read disjoint parts, divided by columns.

    Args:
        rows: this rank's part.
        first_row: number of its first row in the whole table.
        columns: columns of a request, all ranks together.
        comm: of the ranks that hold the parts.
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

    def __call__(self, numbers: Tensor) -> Tensor:
        """See `LookupTable`."""
        expect_shape("numbers", numbers, None, self._columns)
        own = numbers[:, self._start : self._start + self._each] - self._first
        taken = self._rows.take(own.reshape(-1)).view(numbers.shape[0], -1)
        return self._comm.all_gather(taken)

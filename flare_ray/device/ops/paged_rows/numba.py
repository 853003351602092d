"""The indices of a pass over paged state on CPU, in one call: some forty torch operators on a
handful of integers otherwise, three times a round with drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.numba import cube, kernel, matrix, vector


class Sizes(NamedTuple):
    """page: tokens of a page; pool: tokens of a pool; entries: of a ring; null_slot: whose ring
    takes what nobody keeps."""

    page: int
    pool: int
    entries: int
    null_slot: int


class Places(NamedTuple):
    """Fields of `device.layers.rows.PagedRows` by its names."""

    latent_write: Tensor
    ring_read: Tensor
    ring_write: Tensor
    pool_rows: Tensor
    pool_write: Tensor
    pool_number: Tensor
    seen: Tensor


@kernel("iiiiiiiiiiii")
def _place(positions, valid, slots, table, out, batch, width, columns, page, pool, entries, null):
    """`out`: the fields of `Places` one after the other, int64."""
    position, taken = (
        matrix(positions, batch, width, np.int64),
        matrix(valid, batch, width, np.int8),
    )
    slot, pages = vector(slots, batch, np.int64), matrix(table, batch, columns, np.int64)
    count, in_view, per_page = (width + pool - 1) // pool, columns * page, page // pool
    rows, held = batch * width, pool - 1 + width
    latent = vector(out, rows, np.int64)
    at = out + 8 * rows
    ring_read = matrix(at, batch, pool - 1, np.int64)
    at += 8 * batch * (pool - 1)
    ring_write = vector(at, rows, np.int64)
    at += 8 * rows
    pool_rows = matrix(at, batch, count * pool, np.int64)
    at += 8 * batch * count * pool
    pool_write = matrix(at, batch, count, np.int64)
    at += 8 * batch * count
    pool_number = matrix(at, batch, count, np.int64)
    seen = vector(at + 8 * batch * count, rows, np.int64)
    for lane in range(batch):
        end = np.int64(-1)
        for t in range(width):
            here, row = position[lane, t], lane * width + t
            writes = taken[lane, t] != 0 and here < in_view
            seen[row] = here if writes else -1
            end = max(end, seen[row])
            column = min(max(here // page, 0), columns - 1)
            latent[row] = (pages[lane, column] * page if writes else 0) + here % page
            ring_write[row] = (slot[lane] if writes else null) * entries + here % entries
        start = position[lane, width - 1] - (width - 1)
        for j in range(pool - 1):
            ring_read[lane, j] = slot[lane] * entries + (start + 1 - pool + j) % entries
        for j in range(count):
            number = start // pool + j
            column = min(max(number // per_page, 0), columns - 1)
            finished = number >= 0 and (number + 1) * pool - 1 <= end
            place = pages[lane, column] * per_page if finished else 0
            pool_write[lane, j] = place + number % per_page
            pool_number[lane, j] = number
        first = pool - 1 - start % pool
        for j in range(count * pool):
            pool_rows[lane, j] = lane * held + min(first + j, held - 1)


@kernel("iiiiiiii")
def _visible(positions, seen, table, read, bias, batch, shape, page):
    """`shape` = rows of a lane * 2**32 + page-table columns."""
    width, columns = shape >> 32, shape & 0xFFFFFFFF
    position, reached = (
        matrix(positions, batch, width, np.int64),
        matrix(seen, batch, width, np.int64),
    )
    pages = matrix(table, batch, columns, np.int64)
    size = columns * page
    places, hidden = matrix(read, batch, size, np.int64), cube(bias, batch, width, size, np.float32)
    for lane in range(batch):
        end = np.int64(0)
        for t in range(width):
            end = max(end, reached[lane, t])
        for column in range(columns):
            for i in range(page):
                places[lane, column * page + i] = pages[lane, column] * page + i
        last = pages[lane, end // page] * page + end % page
        for i in range(end, size):
            places[lane, i] = last
        for t in range(width):
            edge = min(max(position[lane, t] + 1, 0), size)
            hidden[lane, t, :edge] = np.float32(0.0)
            hidden[lane, t, edge:] = np.float32(-np.inf)


def places(
    positions: Tensor, valid: Tensor, slots: Tensor, page_table: Tensor, sizes: Sizes
) -> Places:
    """Fields of a pass of at most `sizes.entries` rows a lane; arguments as `rows.Span`."""
    batch, width = positions.shape
    expect_shape("valid", valid, batch, width)
    expect_shape("slots", slots, batch)
    expect_shape("page_table", page_table, batch, None)
    rows, pools = batch * width, batch * (-(-width // sizes.pool))
    ring = batch * (sizes.pool - 1)
    lengths = (rows, ring, rows, pools * sizes.pool, pools, pools, rows)
    out = torch.empty(sum(lengths), dtype=torch.int64)
    # Named, since a copy must live until the call returns.
    inputs = [t.contiguous() for t in (positions, valid, slots, page_table)]
    addresses = [t.data_ptr() for t in inputs]
    _place(*addresses, out.data_ptr(), batch, width, page_table.shape[1], *sizes)
    found = Places(*out.split(lengths))
    return found._replace(seen=found.seen.view(batch, width))


def visible(
    positions: Tensor, seen: Tensor, page_table: Tensor, *, page: int
) -> tuple[Tensor, Tensor]:
    """`read` [B * N] and `bias` [B, T, N] float32 of `PagedRows`, N = C * page.

    Args:
        positions: [B, T] int64; seen: [B, T] int64 of `places`; page_table: [B, C] int64.
    """
    (batch, width), columns = positions.shape, page_table.shape[1]
    read = torch.empty(batch * columns * page, dtype=torch.int64)
    bias = torch.empty((batch, width, columns * page))
    inputs = [t.contiguous() for t in (positions, seen, page_table)]
    addresses = [t.data_ptr() for t in (*inputs, read, bias)]
    _visible(*addresses, batch, (width << 32) | columns, page)
    return read, bias

"""Where the rows of one pass read and write state: flat indices, computed once for all layers.

Everything is computed on the device from positions and page tables; only sizes are the host's.
Rows that take no part write to the null page and the null slot, and so do pools that the pass does
not finish.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.recipes.declaration import ProposalStart


@dataclass(slots=True)
class Span:
    """The rows of one pass over paged state.

    Attributes:
        positions: [B, T] int64, consecutive within a lane (leading invalid rows may be clamped).
        valid: [B, T] bool, one run per lane.
        slots: [B] int64.
        page_table: [B, C] int64.
    """

    positions: Tensor
    valid: Tensor
    slots: Tensor
    page_table: Tensor


def proposal_span(start: ProposalStart) -> Span:
    """Rows N - 1, N, ... of a drafter that takes one a step, step-major: `PagedRows.steps` cuts
    them. There is one step even at depth 0, which completes the pair."""
    count = max(start.depth, 1)
    first = (start.consumed - 1).clamp_(min=0)
    ahead = torch.arange(count, device=first.device).unsqueeze(1)
    return Span(
        (first + ahead).view(-1, 1),
        start.active.expand(count, -1).reshape(-1, 1),
        start.slots.expand(count, -1).reshape(-1),
        start.page_table.expand(count, -1, -1).flatten(0, 1),
    )


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """pool: tokens per pool; entries: of the tail ring; top_k: tokens selected."""

    pool: int
    entries: int
    top_k: int

    @property
    def page_pools(self) -> int:
        """Pools per page."""
        return PAGE_TOKENS // self.pool


@dataclass(slots=True)
class PagedRows:
    """Flat indices of B lanes of T rows; every tensor is lane-major in its first dimension.

    Attributes:
        batch, width: B, T.
        latent_write: [B * T] positions of the page pool.
        ring_read: [B * (pool - 1)] ring entries of the rows before the first.
        ring_rows: [B * entries] rows of the pass that stay in the ring; None = all of them.
        ring_write: [B * T] or [B * entries] their ring entries.
        pool_rows: [B * pools * pool] places in (ring rows, new rows) that form pools; None = the
            places as they are, of a pass of one row.
        pool_write: [B * pools] places of the pooled pages.
        pool_number: [B * pools] which pools of the lane these are, -1 or less before the first.
        seen: [B, T] last position a row attends to, -1 = the row takes no part and attends to
            nothing: the page of its own position is not its lane's yet and may hold anything.
        page_table: [B, C].
        read: [B * N] positions to attend to; None = selected row by row, or no attention. N = C *
            page size.
        bias: [B, T, N] 0 = visible, -inf = hidden; None as `read`.
        pool_read: [B * P] places of every pool in view, where rows select.
    """

    batch: int
    width: int
    latent_write: Tensor
    ring_read: Tensor
    ring_rows: Tensor | None
    ring_write: Tensor
    pool_rows: Tensor | None
    pool_write: Tensor
    pool_number: Tensor
    seen: Tensor
    page_table: Tensor
    read: Tensor | None = None
    bias: Tensor | None = None
    pool_read: Tensor | None = None

    def steps(self, count: int) -> list[PagedRows]:
        """Cut B = count * B' lanes of one row into `count` passes of B' lanes."""
        parts: list[dict[str, object]] = [
            {"batch": self.batch // count, "width": 1} for _ in range(count)
        ]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                for part, piece in zip(parts, value.chunk(count), strict=True):
                    part[field.name] = piece
            elif field.name not in parts[0]:
                for part in parts:
                    part[field.name] = value
        return [PagedRows(**part) for part in parts]  # type: ignore[arg-type]


def paged_rows(
    span: Span,
    layout: IndexLayout,
    *,
    null_slot: int,
    dtype: torch.dtype,
    attends: bool = True,
) -> PagedRows:
    """Indices of a pass over latents, pools and rings.

    Attention reads every visible position where the page table in view holds no more than `top_k`
    of them, for then selection keeps everything; else rows select.

    Args:
        null_slot: S, the slot whose ring takes what nobody keeps.
        dtype: of the bias.
        attends: False = the rows only write.
    """
    width = span.positions.shape[1]
    in_view = span.page_table.shape[1] * PAGE_TOKENS
    if span.positions.device.type == "cpu" and width <= layout.entries:
        rows = _compiled_rows(span, layout, null_slot)
        if attends and in_view <= layout.top_k:
            rows.read, rows.bias = _compiled_view(span, rows.seen, dtype)
        elif attends:
            rows.pool_read = _every_pool(span, layout)
        return rows
    return _plain_rows(span, layout, null_slot=null_slot, dtype=dtype, attends=attends)


def _plain_rows(
    span: Span, layout: IndexLayout, *, null_slot: int, dtype: torch.dtype, attends: bool
) -> PagedRows:
    """`paged_rows` in torch operators: what CUDA and passes wider than a ring run, and what the
    compiled form is compared with."""
    width = span.positions.shape[1]
    in_view = span.page_table.shape[1] * PAGE_TOKENS
    valid = span.valid & (span.positions < in_view)
    seen = torch.where(valid, span.positions, -1)
    end = seen.amax(1, keepdim=True)
    start = span.positions[:, -1:] - (width - 1)
    written = _Written(valid, start, end, null_slot)
    ring_read, ring_rows, ring_write = _ring(span, layout, written)
    pool_rows, pool_write, pool_number = _pools(span, layout, written)
    rows = PagedRows(
        batch=span.positions.shape[0],
        width=width,
        latent_write=_place(span.page_table, span.positions, valid).view(-1),
        ring_read=ring_read,
        ring_rows=ring_rows,
        ring_write=ring_write,
        pool_rows=pool_rows,
        pool_write=pool_write,
        pool_number=pool_number,
        seen=seen,
        page_table=span.page_table,
    )
    if not attends:
        return rows
    if in_view <= layout.top_k:
        rows.read, rows.bias = _visible(span, end, dtype)
    else:
        rows.pool_read = _every_pool(span, layout)
    return rows


def _every_pool(span: Span, layout: IndexLayout) -> Tensor:
    """`pool_read` of `PagedRows`."""
    inside = torch.arange(layout.page_pools, device=span.page_table.device)
    return (span.page_table.unsqueeze(2) * layout.page_pools + inside).view(-1)


def _compiled_rows(span: Span, layout: IndexLayout, null_slot: int) -> PagedRows:
    """A pass on CPU, of rows that all stay in the ring; without a view."""
    from flare_ray.device.ops.paged_rows import numba

    batch, width = span.positions.shape
    sizes = numba.Sizes(PAGE_TOKENS, layout.pool, layout.entries, null_slot)
    places = numba.places(span.positions, span.valid, span.slots, span.page_table, sizes)
    return PagedRows(
        batch=batch,
        width=width,
        latent_write=places.latent_write,
        ring_read=places.ring_read,
        ring_rows=None,
        ring_write=places.ring_write,
        pool_rows=None if width == 1 else places.pool_rows,
        pool_write=places.pool_write,
        pool_number=places.pool_number,
        seen=places.seen,
        page_table=span.page_table,
    )


def _compiled_view(span: Span, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`read` and `bias` on CPU."""
    from flare_ray.device.ops.paged_rows import numba

    read, bias = numba.visible(span.positions, seen, span.page_table, page=PAGE_TOKENS)
    return read, bias.to(dtype)


@dataclass(slots=True)
class DenseRows:
    """Flat indices of B lanes of T rows that attend to everything before them; lane-major.

    Attributes:
        batch, width: B, T.
        write: [B * T] positions of the page pool.
        read: [B * N] positions to attend to; None = the rows only write. N = C * page size.
        bias: [B, T, N] 0 = visible, -inf = hidden; None as `read`.
    """

    batch: int
    width: int
    write: Tensor
    read: Tensor | None = None
    bias: Tensor | None = None

    def steps(self, count: int) -> list[DenseRows]:
        """Cut B = count * B' lanes of one row into `count` passes of B' lanes."""
        absent = [None] * count
        read, bias = (absent if t is None else t.chunk(count) for t in (self.read, self.bias))
        pieces = zip(self.write.chunk(count), read, bias, strict=True)
        return [DenseRows(self.batch // count, 1, *piece) for piece in pieces]


def dense_rows(span: Span, *, dtype: torch.dtype, attends: bool = True) -> DenseRows:
    """Indices of a pass over keys and values by position.

    Args:
        dtype: of the bias.
        attends: False = the rows only write.
    """
    batch, width = span.positions.shape
    in_view = span.page_table.shape[1] * PAGE_TOKENS
    valid = span.valid & (span.positions < in_view)
    rows = DenseRows(batch, width, _place(span.page_table, span.positions, valid).view(-1))
    if attends:
        end = torch.where(valid, span.positions, -1).amax(1, keepdim=True)
        rows.read, rows.bias = _visible(span, end, dtype)
    return rows


def _visible(span: Span, end: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`read` and `bias` of rows that see every position up to their own.

    Reads point positions a lane has not reached at its last row, `end` [B, 1], so that no stale
    value enters a product.
    """
    place = torch.arange(span.page_table.shape[1] * PAGE_TOKENS, device=end.device)
    reached = torch.minimum(place, end.clamp(min=0))
    hidden = place > span.positions.unsqueeze(2)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return _place(span.page_table, reached).view(-1), bias.masked_fill_(hidden, float("-inf"))


def _place(page_table: Tensor, positions: Tensor, valid: Tensor | None = None) -> Tensor:
    """[B, X] positions -> places in the page pool; those not valid go to the null page."""
    column = (positions // PAGE_TOKENS).clamp_(0, page_table.shape[1] - 1)
    page = page_table.gather(1, column)
    if valid is not None:
        page.mul_(valid)
    return page.mul_(PAGE_TOKENS).add_(positions % PAGE_TOKENS)


def listed_places(page_table: Tensor, tokens: Tensor) -> Tensor:
    """[B, T, N] token positions, -1 = none -> [B * T, N] places in the page pool, -1 = none."""
    column = (tokens // PAGE_TOKENS).clamp_(0, page_table.shape[1] - 1).flatten(1)
    page = page_table.gather(1, column).view_as(tokens)
    places = page.mul_(PAGE_TOKENS).add_(tokens % PAGE_TOKENS)
    return places.masked_fill_(tokens < 0, -1).flatten(0, 1)


def join_ring(raw: Tensor, rows: PagedRows, tail: Tensor, *, pool: int) -> Tensor:
    """Rows [B * pools, pool, D] of the pools that a pass may finish; leaves in the ring what stays.

    The ring is read before it is written: a long pass overwrites what its first pool needs.

    Args:
        raw: [B * T, D].
        tail: [(S + 1) * entries, D], written in place.
        pool: rows of a pool.
    """
    before = tail.index_select(0, rows.ring_read).view(rows.batch, pool - 1, raw.shape[1])
    held = torch.cat((before, raw.unflatten(0, (rows.batch, rows.width))), dim=1).flatten(0, 1)
    if rows.pool_rows is not None:
        held = held.index_select(0, rows.pool_rows)
    kept = raw if rows.ring_rows is None else raw.index_select(0, rows.ring_rows)
    tail.index_copy_(0, rows.ring_write, kept)
    return held.view(-1, pool, raw.shape[1])


@dataclass(slots=True)
class _Written:
    """valid [B, T] rows that write; start, end [B, 1] positions of the first row and of the last
    that writes (-1 = none)."""

    valid: Tensor
    start: Tensor
    end: Tensor
    null_slot: int


def _ring(
    span: Span, layout: IndexLayout, written: _Written
) -> tuple[Tensor, Tensor | None, Tensor]:
    """ring_read, ring_rows and ring_write of `PagedRows`."""
    batch, width = span.positions.shape
    valid, start, end = written.valid, written.start, written.end
    entries = layout.entries
    slots = span.slots.unsqueeze(1)
    device = start.device
    before = start + torch.arange(1 - layout.pool, 0, device=device)
    read = (slots * entries + before % entries).view(-1)
    positions, rows = span.positions, None
    if width > entries:
        # Only the last rows of a long pass stay; each ring entry is written by one of them.
        positions = end + torch.arange(1 - entries, 1, device=device)
        valid = (positions >= 0) & (positions >= start)
        row = (positions - start).clamp_(0, width - 1)
        rows = (row + torch.arange(batch, device=device).unsqueeze(1) * width).view(-1)
    kept = torch.where(valid, slots, written.null_slot)
    write = (kept * entries).add_(positions % entries).view(-1)
    return read, rows, write


def _pools(
    span: Span, layout: IndexLayout, written: _Written
) -> tuple[Tensor | None, Tensor, Tensor]:
    """pool_rows, pool_write and pool_number of `PagedRows`."""
    batch, width = span.positions.shape
    pool, per_page = layout.pool, layout.page_pools
    start, end = written.start, written.end
    count = (width + pool - 1) // pool
    device = start.device
    number = start // pool + torch.arange(count, device=device)
    finished = (number >= 0) & ((number + 1) * pool - 1 <= end)
    column = (number // per_page).clamp_(0, span.page_table.shape[1] - 1)
    page = span.page_table.gather(1, column).mul_(finished)
    write = page.mul_(per_page).add_(number % per_page).view(-1)
    if width == 1:
        return None, write, number.view(-1)
    held = pool - 1 + width
    first = (start % pool).neg_().add_(pool - 1)
    rows = (first + torch.arange(count * pool, device=device)).clamp_(max=held - 1)
    rows += torch.arange(batch, device=device).unsqueeze(1) * held
    return rows.view(-1), write, number.view(-1)


@dataclass(slots=True)
class RecurrentRows:
    """Where B lanes of T rows read and write recurrent state and convolution history.

    Attributes:
        batch, width: B, T.
        slots: [B].
        column: [B] the last round's row after which a lane's state is live.
        state_read: [B] saved states to start from.
        state_write: [B * T] saved states to write in a round, [B] in a prefill.
        window_read: [B * keep] live history rows.
        window_rows: [B * (keep + 1)] rows of (history, new rows) that a prefill leaves in the
            window; None = a round, which leaves all of them.
        valid: [B, T] bool in a prefill; None = a round.
    """

    batch: int
    width: int
    slots: Tensor
    column: Tensor
    state_read: Tensor
    state_write: Tensor
    window_read: Tensor
    window_rows: Tensor | None = None
    valid: Tensor | None = None


def round_rows(slots: Tensor, column: Tensor, *, width: int, keep: int) -> RecurrentRows:
    """Indices of a round: row t of a lane saves its state in column t."""
    first = slots * MAX_WIDTH
    steps = torch.arange(width, device=slots.device)
    return RecurrentRows(
        batch=slots.shape[0],
        width=width,
        slots=slots,
        column=column,
        state_read=first + column,
        state_write=(first.unsqueeze(1) + steps).view(-1),
        window_read=_live_window(slots, column, keep),
    )


def prefill_rows(
    slots: Tensor, column: Tensor, *, valid: Tensor, lengths: Tensor, keep: int
) -> RecurrentRows:
    """Indices of a prefill: each lane's last valid state goes to column 0.

    Args:
        valid: [B, T] bool.
        lengths: [B] int64 valid rows.
    """
    batch, width = valid.shape
    last = (lengths - 1).clamp_(min=0).unsqueeze(1)
    rows = last + torch.arange(keep + 1, device=slots.device)
    rows += torch.arange(batch, device=slots.device).unsqueeze(1) * (keep + width)
    return RecurrentRows(
        batch=batch,
        width=width,
        slots=slots,
        column=column,
        state_read=slots * MAX_WIDTH + column,
        state_write=slots * MAX_WIDTH,
        window_read=_live_window(slots, column, keep),
        window_rows=rows.view(-1),
        valid=valid,
    )


def join_window(raw: Tensor, rows: RecurrentRows, window: Tensor) -> Tensor:
    """History and new rows [B, keep + T, *shape]; leaves what becomes history in the window.

    Args:
        raw: [B * T, *shape] of the window's type.
        window: [S + 1, keep + 8, *shape], written in place.
    """
    shape = raw.shape[1:]
    history = window.flatten(0, 1).index_select(0, rows.window_read)
    new = raw.unflatten(0, (rows.batch, rows.width))
    joined = torch.cat((history.view(rows.batch, -1, *shape), new), dim=1)
    kept = joined
    if rows.window_rows is not None:
        kept = joined.flatten(0, 1).index_select(0, rows.window_rows)
        kept = kept.view(rows.batch, -1, *shape)
    window[:, : kept.shape[1]].index_copy_(0, rows.slots, kept)
    return joined


def _live_window(slots: Tensor, column: Tensor, keep: int) -> Tensor:
    first = slots * (keep + MAX_WIDTH) + column
    return (first.unsqueeze(1) + torch.arange(1, keep + 1, device=slots.device)).view(-1)

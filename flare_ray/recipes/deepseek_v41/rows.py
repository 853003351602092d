"""Where the rows of one pass read and write state: flat indices, computed once for all layers.

Rows are flat, R = B * T, and a row knows its own slot and position. A pass of few rows writes all
of them into the rings before any reads, so lanes may even share a slot (a packed round). A longer
one reads its own rows from a buffer made of the history and the pass, and leaves its last rows in
the rings.

Everything is computed on the device from positions and page tables; only sizes are the host's.
Rows that take no part write to the null slot and the null page and see nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.recipes.declaration import AbsorbRows, Rows


@dataclass(slots=True)
class Span:
    """The rows of one pass.

    Attributes:
        positions, valid: [B, T]; valid rows are one run per lane.
        slots: [B]; page_table: [B, C]; null_slot: S.
    """

    positions: Tensor
    valid: Tensor
    slots: Tensor
    page_table: Tensor
    null_slot: int

    @classmethod
    def of(cls, rows: Rows | AbsorbRows, null_slot: int) -> Span:
        """The span of a program's rows; what lies behind the pages in view takes no part."""
        valid = rows.valid & (rows.positions < rows.page_table.shape[1] * PAGE_TOKENS)
        return cls(rows.positions, valid, rows.slots, rows.page_table, null_slot)

    @property
    def flat_positions(self) -> Tensor:
        """[R]."""
        return self.positions.reshape(-1)


class Ring:
    """One length of look-back over one pass.

    Args:
        span: the pass.
        history: positions that a row reads back.
        entries: of the ring.
        reads: False = the rows only write.
    Attributes:
        index: [R, history + 1] places of a row's positions in the buffer that `store` returns,
            newest first, -1 = before the sequence or a row that takes no part.
    """

    def __init__(self, span: Span, history: int, entries: int, *, reads: bool = True) -> None:
        batch, width = span.positions.shape
        self._batch, self._width = batch, width
        self._history_read: Tensor | None = None
        self._kept: Tensor | None = None
        device = span.positions.device
        slots = span.slots.unsqueeze(1)
        back = torch.arange(history + 1, device=device)
        seen = span.positions.unsqueeze(2) - back
        hidden = (seen < 0) | ~span.valid.unsqueeze(2)
        direct = width <= MAX_WIDTH
        if direct or width <= entries:
            kept = torch.where(span.valid, slots, span.null_slot)
            self._write = (kept * entries + span.positions % entries).view(-1)
        else:
            self._keep_last(span, entries)
        if direct:
            place = slots.unsqueeze(2) * entries + seen % entries
        else:
            before = span.positions[:, :1] - torch.arange(history, 0, -1, device=device)
            self._history_read = (slots * entries + before % entries).view(-1)
            lane = torch.arange(batch, device=device).view(-1, 1, 1) * (history + width)
            place = lane + torch.arange(width, device=device).view(-1, 1) + history - back
        if reads:
            self.index = place.masked_fill_(hidden, -1).view(batch * width, -1)

    def store(self, ring: Tensor, rows: Tensor) -> Tensor:
        """Write rows [R, ...] into a ring [S + 1, entries, ...]; the buffer that `index` counts."""
        flat = ring.flatten(0, 1)
        if self._history_read is None:
            flat.index_copy_(0, self._write, rows)
            return flat
        history = flat.index_select(0, self._history_read).unflatten(0, (self._batch, -1))
        new = rows.unflatten(0, (self._batch, self._width))
        buffer = torch.cat((history, new), dim=1).flatten(0, 1)
        self.write(ring, rows)
        return buffer

    def write(self, ring: Tensor, rows: Tensor) -> None:
        """Write rows [R, ...] alone."""
        if self._kept is not None:
            rows = rows.index_select(0, self._kept)
        ring.flatten(0, 1).index_copy_(0, self._write, rows)

    def _keep_last(self, span: Span, entries: int) -> None:
        """Only the last rows of a long pass stay; each entry is written by one of them."""
        device = span.positions.device
        start = span.positions[:, :1]
        end = torch.where(span.valid, span.positions, -1).amax(1, keepdim=True)
        positions = end + torch.arange(1 - entries, 1, device=device)
        inside = positions >= start.clamp(min=0)
        row = (positions - start).clamp_(0, self._width - 1)
        lane = torch.arange(self._batch, device=device).unsqueeze(1)
        self._kept = (row + lane * self._width).view(-1)
        kept = torch.where(inside, span.slots.unsqueeze(1), span.null_slot)
        self._write = (kept * entries + positions % entries).view(-1)


@dataclass(slots=True)
class Entries:
    """Compressed entries of one ratio.

    Attributes:
        write: [R] places of the page pool; the null page's where a row ends no entry.
        first: [R] position of an entry's first token: how far it is rotated.
        visible: [B, T] entries a row sees, 0 where it takes no part.
        read: [B, N] places of every entry in view.
        every: [R, N] places with -1 = hidden, where all in view are taken; None = rows select.
    """

    write: Tensor
    first: Tensor
    visible: Tensor
    read: Tensor
    every: Tensor | None


def entry_rows(span: Span, ratio: int, *, top_k: int) -> Entries:
    """Where a pass's rows write and read the entries of one ratio.

    No selection is needed where the page table in view holds no more than `top_k` entries.
    """
    batch, width = span.positions.shape
    per_page = PAGE_TOKENS // ratio
    device = span.positions.device
    column = (span.positions // PAGE_TOKENS).clamp_(0, span.page_table.shape[1] - 1)
    ends = span.valid & (span.positions % ratio == ratio - 1)
    page = span.page_table.gather(1, column) * ends
    write = page * per_page + span.positions // ratio % per_page * ends
    visible = (span.positions + 1) // ratio * span.valid
    inside = torch.arange(per_page, device=device)
    read = (span.page_table.unsqueeze(2) * per_page + inside).view(batch, -1)
    every = None
    count = read.shape[1]
    if count <= top_k:
        hidden = torch.arange(count, device=device) >= visible.unsqueeze(2)
        every = read.unsqueeze(1).expand(-1, width, -1).masked_fill(hidden, -1)
        every = every.reshape(batch * width, count)
    first = (span.positions - (ratio - 1)).clamp_(min=0).reshape(-1)
    return Entries(write.view(-1), first, visible, read, every)

"""Drives any recipe's target and drafter by hand: rows, absorption and proposals without an engine.

It does what a round does and nothing more, so that a test can choose accepted counts, paddings,
page numbers and wrong drafts at will.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.speculation.commit import absorb_accepted, absorb_rows
from flare_ray.device.state.layout import StateLimits
from flare_ray.device.state.store import TORCH_DTYPE, StateStore
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.kept import Keeping
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    ProposalStart,
    Rows,
    TargetOutput,
    resolve,
)
from flare_ray.recipes.registry import find_recipe
from tests.support.poison import poison

PAGE = 64


@dataclass
class Lane:
    """One request: its slot, its pages in order, and what a round would keep about it."""

    slot: int
    pages: list[int]
    consumed: int = 0
    column: int = 0
    tail: Tensor | None = None


@dataclass
class Verified:
    """A verified round that is not committed yet."""

    rows: Rows
    output: TargetOutput
    lanes: list[Lane]


@dataclass
class GreedySink:
    """Takes the lowest-id maximum of each draft, or the given tokens; keeps logits."""

    forced: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    forecasts: list[Tensor] = field(default_factory=list)

    def forecast(self, depth: int, confidence: Tensor) -> None:
        assert depth == len(self.forecasts) == len(self.tokens)
        self.forecasts.append(confidence.clone())

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        token = logits.argmax(-1) if self.forced is None else self.forced[:, depth]
        self.tokens.append(token)
        return token


class RecipeDriver:
    """Target, drafter and state of one rank."""

    def __init__(
        self,
        folder: Path,
        comm: Communicator | None = None,
        *,
        slots: int = 4,
        num_pages: int = 40,
        dtype: str = "float32",
        keeping: Keeping | None = None,
    ) -> None:
        keeping = keeping or Keeping("cpu")
        device = keeping.device
        config = json.loads((folder / "config.json").read_text())
        recipe = self.recipe = find_recipe(config)
        self.geometry: Any = resolve(recipe.geometry)(config)
        self.device = device
        self.slots = slots
        comm = comm or SingleGroup()
        specs = resolve(recipe.manifest)(self.geometry)
        options = BuildOptions(device=device, dtype=dtype, prefill_tokens=64, max_width=8)
        weights = RankWeights(
            open_checkpoint(folder),
            specs,
            device=device,
            dtype=TORCH_DTYPE[dtype],
            keeping=keeping,
        )
        with torch.inference_mode(), weights:
            self.target = resolve(recipe.target)(self.geometry, weights, comm, options)
            weights.assert_all_used("target")
            self.drafter = resolve(recipe.drafter)(self.geometry, weights, comm, options)
            weights.assert_all_used("drafter")
        limits = StateLimits(
            slots=slots,
            num_pages=num_pages,
            context_tokens=(num_pages - 1) * PAGE,
            dtype=dtype,
            device=device,
            vocab_size=self.geometry.vocab_size,
            speculation=True,
        )
        self.store = StateStore(resolve(recipe.state)(self.geometry, comm.size), limits)
        self.state = self.store.groups

    @property
    def pool(self) -> int:
        """Positions that share an index key; 1 where there are none."""
        return PAGE // min(g.shape[0] for g in self.store.spec_groups if g.kind == "page")

    def poison(self) -> None:
        """Fill all state but the live rows of a fresh slot, which `open` clears."""
        for tensor in self.state.values():
            poison(tensor)

    def open(self, slot: int, pages: Sequence[int]) -> Lane:
        """A fresh request: its slot's live rows are zero, as a slot hand-over leaves them."""
        for group in self.store.spec_groups:
            tensor = self.state[group.name]
            if group.kind in ("column", "record"):
                tensor[slot, 0].zero_()
            elif group.kind in ("window", "replayed"):
                tensor[slot].zero_()
        return Lane(slot, list(pages))

    def fresh(self, count: int = 1, *, pages: int = 3) -> list[Lane]:
        """New lanes over poisoned state: anything read before it was written is NaN."""
        self.poison()
        numbers = torch.randperm(
            self.store.limits.num_pages - 1, generator=torch.Generator().manual_seed(count)
        )
        return [
            self.open(slot, (numbers[slot * pages : (slot + 1) * pages] + 1).tolist())
            for slot in range(count)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        lanes: list[Lane],
        tokens: Sequence[Sequence[int]],
        *,
        padded: int = 0,
        columns: int | None = None,
        last_only: bool = False,
    ) -> list[Tensor]:
        """Consume one chunk per lane as a prefill does, pairs included.

        Args:
            padded: inactive lanes added behind the real ones.
            columns: page-table columns in view, None = as many as the lanes need.
        Returns:
            Logits [len, V] per lane ([1, V] with last_only).
        """
        rows = self._rows(lanes, tokens, padded=padded, columns=columns)
        rows.prefill, rows.last_only = True, last_only
        output = self.target.forward(rows, self.state)
        self._absorb_chunk(lanes, rows, output, padded)
        result = []
        for index, (lane, chunk) in enumerate(zip(lanes, tokens, strict=True)):
            lane.consumed += len(chunk)
            lane.column = 0
            lane.tail = output.feedback[index, len(chunk) - 1].clone()
            result.append(output.logits[index, : 1 if last_only else len(chunk)].clone())
        return result

    def _absorb_chunk(
        self, lanes: list[Lane], rows: Rows, output: TargetOutput, padded: int
    ) -> None:
        if self.store.spec.history == "rows":
            self.drafter.absorb(absorb_rows(rows, output.feedback, rows.valid), self.state)
            return
        before = torch.stack([self._tail(lane) for lane in self._padded(lanes, padded)])
        positions = rows.positions - 1
        self.drafter.absorb(
            AbsorbRows(
                tokens=rows.tokens,
                feedback=torch.cat((before.unsqueeze(1), output.feedback[:, :-1]), dim=1),
                positions=positions.clamp(min=0),
                valid=rows.valid & (positions >= 0),
                slots=rows.slots,
                page_table=rows.page_table,
            ),
            self.state,
        )

    @torch.inference_mode()
    def verify(
        self,
        lanes: list[Lane],
        tokens: Sequence[Sequence[int]],
        *,
        width: int | None = None,
        padded: int = 0,
        columns: int | None = None,
    ) -> Verified:
        """Run one round's rows; shorter lists leave invalid rows up to `width`."""
        rows = self._rows(lanes, tokens, width=width, padded=padded, columns=columns)
        return Verified(rows, self.target.forward(rows, self.state), lanes)

    @torch.inference_mode()
    def commit(self, verified: Verified, emitted: Sequence[int]) -> None:
        """Accept a prefix per lane and absorb the pairs it completes."""
        rows, output = verified.rows, verified.output
        count = torch.zeros(rows.tokens.shape[0], dtype=torch.int64, device=self.device)
        count[: len(emitted)] = torch.tensor(list(emitted), device=self.device)
        self.target.commit(rows, count, self.state)
        absorb_accepted(self.drafter, self.store, rows, output.feedback, count)
        for index, (lane, taken) in enumerate(zip(verified.lanes, emitted, strict=True)):
            lane.consumed += taken
            lane.column = taken - 1
            lane.tail = output.feedback[index, taken - 1].clone()

    @torch.inference_mode()
    def propose(
        self,
        lanes: list[Lane],
        pending: Sequence[int],
        depth: int,
        *,
        forced: Tensor | None = None,
        padded: int = 0,
        columns: int | None = None,
    ) -> GreedySink:
        """Complete the pair at N - 1 and draft."""
        if forced is not None and padded:
            forced = torch.cat((forced, forced.new_zeros((padded, forced.shape[1]))))
        sink = GreedySink(forced)
        every = self._padded(lanes, padded)
        table = self._table(every, columns or self._columns(lanes, depth))
        tokens = [*pending, *([0] * padded)]
        start = ProposalStart(
            pending=torch.tensor(tokens, device=self.device),
            tail=torch.stack([self._tail(lane) for lane in every]),
            consumed=torch.tensor(
                [lane.consumed if lane else 0 for lane in every], device=self.device
            ),
            active=torch.tensor([lane is not None for lane in every], device=self.device),
            slots=self._slots(every),
            page_table=table,
            depth=depth,
        )
        self.drafter.propose(start, self.state, sink)
        return sink

    def _rows(
        self,
        lanes: list[Lane],
        tokens: Sequence[Sequence[int]],
        *,
        width: int | None = None,
        padded: int = 0,
        columns: int | None = None,
    ) -> Rows:
        every = self._padded(lanes, padded)
        width = width or max(len(row) for row in tokens)
        lists = [*tokens, *([] for _ in range(padded))]
        place = torch.arange(width, device=self.device)
        lengths = torch.tensor([len(row) for row in lists], device=self.device)
        consumed = torch.tensor([lane.consumed if lane else 0 for lane in every])
        return Rows(
            tokens=torch.tensor(
                [[*row, *([1] * (width - len(row)))] for row in lists], device=self.device
            ),
            slots=self._slots(every),
            positions=consumed.to(self.device).unsqueeze(1) + place,
            valid=place < lengths.unsqueeze(1),
            lengths=lengths,
            column=torch.tensor([lane.column if lane else 0 for lane in every]).to(self.device),
            page_table=self._table(every, columns or self._columns(lanes, width)),
            last_only=False,
            prefill=False,
        )

    def _padded(self, lanes: list[Lane], padded: int) -> list[Lane | None]:
        return [*lanes, *([None] * padded)]

    def _slots(self, lanes: Sequence[Lane | None]) -> Tensor:
        values = [self.slots if lane is None else lane.slot for lane in lanes]
        return torch.tensor(values, device=self.device)

    def _columns(self, lanes: list[Lane], ahead: int) -> int:
        return max(-(-(lane.consumed + ahead) // PAGE) for lane in lanes)

    def _table(self, lanes: Sequence[Lane | None], columns: int) -> Tensor:
        table = [([] if lane is None else lane.pages)[:columns] for lane in lanes]
        return torch.tensor(
            [[*pages, *([0] * (columns - len(pages)))] for pages in table], device=self.device
        )

    def _tail(self, lane: Lane | None) -> Tensor:
        kept = self.store.request.tail
        assert kept is not None, "a recipe whose history is pairs keeps a tail"
        if lane is None or lane.tail is None:
            return torch.zeros_like(kept[0])
        return lane.tail[: kept.shape[1]].to(kept.dtype)

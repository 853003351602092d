"""The scripted target: table rows, looked up through a history every state group vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from tests.support.scripted.geometry import Script
from tests.support.scripted.state import KEEP, RING, page_places, powers, signature

DAMAGE_STRIDE = 5
"""Rows by which one disagreement shifts the lookup."""


def target(
    script: Script, weights: Any, comm: Communicator, options: BuildOptions
) -> ScriptedTarget:
    """Builder."""
    return ScriptedTarget(script, comm)


class ScriptedTarget:
    """Table lookup; logits are held in vocabulary shards and gathered."""

    def __init__(self, script: Script, comm: Communicator) -> None:
        self.script = script
        self.comm = comm
        self.shard = script.table().chunk(comm.size, dim=1)[comm.rank].contiguous()
        self.powers = powers(script.max_context_tokens + 128)

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """See `Target`."""
        width = rows.tokens.shape[1]
        start = rows.positions[:, 0]
        hashed, damage = self._history(rows, state, start)
        terms = (rows.tokens + 1) * self.powers[rows.positions] * rows.valid
        hashes = hashed.unsqueeze(1) + terms.cumsum(1)
        window = _live_window(rows, state)
        joined = torch.cat((window, (rows.tokens + 1).to(window.dtype)), dim=1)
        previous = joined[:, KEEP - 1 : KEEP - 1 + width].to(torch.int64) - 1
        self._write(rows, state, hashes, joined)

        index = rows.tokens
        if self.script.order == 2:
            index = previous.clamp(min=0) * self.script.vocab_size + rows.tokens
        index = (index + DAMAGE_STRIDE * damage.unsqueeze(1)) % self.script.num_rows
        last = (rows.lengths - 1).clamp(min=0).unsqueeze(1)
        chosen = index.gather(1, last) if rows.last_only else index
        logits = self.comm.all_gather(self.shard[chosen])
        sign = signature(hashes)
        return TargetOutput(
            logits=logits,
            feedback=torch.stack((sign, rows.tokens), dim=-1).to(torch.float32),
            sampling=torch.stack((sign, rows.tokens, rows.positions, index), -1).float(),
        )

    def head(self, sampling: Tensor) -> Tensor:
        """The table's row that the last input chose."""
        return self.comm.all_gather(self.shard[sampling[:, 3].to(torch.int64)])

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Advance the row group by the accepted inputs."""
        taken = torch.arange(rows.tokens.shape[1]) < emitted.unsqueeze(1)
        terms = (rows.tokens + 1) * self.powers[rows.positions] * taken
        total = state["total_row"]
        total.index_copy_(0, rows.slots, total[rows.slots] + terms.sum(1))

    def _history(
        self, rows: Rows, state: Mapping[str, Tensor], start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(H(N) by the pages, number of groups' entries that disagree with the pages)."""
        history = state["token_pages"][rows.page_table].flatten(1)
        place = torch.arange(history.shape[1])
        hashed = ((history + 1) * self.powers[place] * (place < start.unsqueeze(1))).sum(1)
        recent = start.unsqueeze(1) - torch.arange(KEEP, 0, -1)
        exists = recent >= 0
        token = history.gather(1, recent.clamp(min=0)) + 1
        ring = state["recent_ring"][rows.slots.unsqueeze(1), recent % RING]
        wrong = (ring != token) & exists
        wrong = wrong + (_live_window(rows, state) != token * exists).to(torch.int64)
        damage = wrong.sum(1) + (state["total_row"][rows.slots] != hashed)
        damage = damage + (state["hash_column"][rows.slots, rows.column] != hashed)
        return hashed, damage * (rows.lengths > 0)

    def _write(
        self, rows: Rows, state: Mapping[str, Tensor], hashes: Tensor, joined: Tensor
    ) -> None:
        pages, offsets = page_places(rows.page_table, rows.positions, rows.valid)
        state["token_pages"][pages, offsets] = rows.tokens
        slots = rows.slots.unsqueeze(1)
        null = state["recent_ring"].shape[0] - 1
        end = (rows.positions[:, 0] + rows.lengths).unsqueeze(1)
        kept = rows.valid & (rows.positions >= end - RING)
        ring_slots = torch.where(kept, slots, null)
        state["recent_ring"][ring_slots, rows.positions % RING] = (rows.tokens + 1).float()
        width = rows.tokens.shape[1]
        if rows.prefill:
            last = (rows.lengths - 1).clamp(min=0).unsqueeze(1)
            state["hash_column"][rows.slots, 0] = hashes.gather(1, last).squeeze(1)
            entries = rows.lengths.unsqueeze(1) + torch.arange(KEEP)
            state["recent_window"][slots, torch.arange(1, KEEP + 1)] = joined.gather(1, entries)
        else:
            state["hash_column"][slots, torch.arange(width)] = hashes
            state["recent_window"][slots, torch.arange(KEEP + width)] = joined


def _live_window(rows: Rows, state: Mapping[str, Tensor]) -> Tensor:
    """[B, KEEP] token + 1 of the last positions, 0 = before the start."""
    entries = rows.column.unsqueeze(1) + torch.arange(1, KEEP + 1)
    return state["recent_window"][rows.slots.unsqueeze(1), entries]

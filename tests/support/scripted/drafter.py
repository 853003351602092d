"""The scripted drafter: plays its script, and proposes from a wrong row if its pairs do not chain.

Pair i holds (x[i+1] + 1, signature of H after x[i]). Consecutive pairs must satisfy
    signature[i+1] - signature[i] = (x[i+1] + 1) * POWER[i+1]   mod SIGNATURE
so a missing, stale or draft-derived pair is noticed. Like a recursive drafter it also writes rows
for its own proposals, which the round must leave unreachable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flare_ray.recipes.declaration import (
    AbsorbRows,
    BuildOptions,
    Communicator,
    DraftSink,
    ProposalStart,
)
from tests.support.scripted.geometry import Script, one_hot_logits
from tests.support.scripted.state import RING, SIGNATURE, page_places, powers

GUESS = -5
"""Signature of a pair made from a proposal, equal to none of a target row."""
BROKEN_STRIDE = 3


def drafter(
    script: Script, weights: Any, comm: Communicator, options: BuildOptions
) -> ScriptedDrafter:
    """Builder."""
    return ScriptedDrafter(script, comm)


class ScriptedDrafter:
    """See the module."""

    max_depth = 7

    def __init__(self, script: Script, comm: Communicator) -> None:
        self.script = script
        self.comm = comm
        self.best = script.table().nan_to_num(0.0, neginf=0.0).argmax(1)
        self.shard = script.draft_table().chunk(comm.size, dim=1)[comm.rank].contiguous()
        self.powers = powers(script.max_context_tokens + 128)

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """See `Drafter`."""
        pairs = torch.stack((rows.tokens + 1, rows.feedback[..., 0].to(torch.int64)), dim=-1)
        pages, offsets = page_places(rows.page_table, rows.positions, rows.valid)
        state["pair_pages"][pages, offsets] = pairs
        null = state["pair_ring"].shape[0] - 1
        last = torch.where(rows.valid, rows.positions, -1).amax(1, keepdim=True)
        kept = rows.valid & (rows.positions > last - RING)
        slots = torch.where(kept, rows.slots.unsqueeze(1), null)
        state["pair_ring"][slots, rows.positions % RING] = pairs

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """See `Drafter`."""
        first = (start.consumed - 1).clamp(min=0).unsqueeze(1)
        self.absorb(
            AbsorbRows(
                tokens=start.pending.unsqueeze(1),
                feedback=start.tail.unsqueeze(1),
                positions=first,
                valid=start.active.unsqueeze(1),
                slots=start.slots,
                page_table=start.page_table,
            ),
            state,
        )
        broken = self._broken(start, state)
        previous, token = start.tail[:, 1].to(torch.int64), start.pending
        for depth in range(start.depth):
            row = self._row(previous, token, broken)
            previous, token = token, sink.draw(depth, self._logits(depth, row))
            self._write_guess(start, state, depth, token)

    def _broken(self, start: ProposalStart, state: Mapping[str, Tensor]) -> Tensor:
        """[B] int64, pairs that do not follow from the one before them."""
        history = state["pair_pages"][start.page_table].flatten(1, 2)
        tokens, signs = history[..., 0], history[..., 1]
        place = torch.arange(history.shape[1] - 1)
        grown = signs[:, :-1] + tokens[:, :-1] * self.powers[1 : history.shape[1]]
        wrong = torch.remainder(grown - signs[:, 1:], SIGNATURE) != 0
        wrong &= place < (start.consumed - 1).unsqueeze(1)
        ring = state["pair_ring"][start.slots, (start.consumed - 1).clamp(min=0) % RING]
        here = history.gather(
            1, (start.consumed - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, 2)
        ).squeeze(1)
        return (wrong.sum(1) + (ring != here).any(1)) * start.active

    def _row(self, previous: Tensor, token: Tensor, broken: Tensor) -> Tensor:
        index = token
        if self.script.order == 2:
            index = previous * self.script.vocab_size + token
        return (index + BROKEN_STRIDE * broken) % self.script.num_rows

    def _logits(self, depth: int, row: Tensor) -> Tensor:
        script = self.script
        if script.drafter == "list":
            token = torch.full_like(row, script.draft_tokens[depth])
            return one_hot_logits(token, script.vocab_size)
        if script.drafter == "prefix":
            token = (self.best[row] + (depth >= script.draft_right)) % script.vocab_size
            return one_hot_logits(token, script.vocab_size)
        return self.comm.all_gather(self.shard[row])

    def _write_guess(
        self, start: ProposalStart, state: Mapping[str, Tensor], depth: int, token: Tensor
    ) -> None:
        positions = (start.consumed + depth).unsqueeze(1)
        pages, offsets = page_places(start.page_table, positions, start.active.unsqueeze(1))
        guess = torch.stack((token + 1, torch.full_like(token, GUESS)), dim=-1)
        state["pair_pages"][pages, offsets] = guess.unsqueeze(1)

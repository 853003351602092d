"""Commit: clip what was accepted, advance the slots, repair the drafter's history.

One lane that verified W rows and emits t tokens (contract: T3, T4):

    verified row     0    1   ...  t-1     t ... W-1
    input            p    d0  ...  d_t-2   rejected or clipped: unreachable after the commit
    emitted token    d0   d1  ...  token t-1, stays pending
    state            live column becomes t-1; the tail becomes row t-1's feedback
    drafter pairs    (h_N, d0) .. (h_N+t-2, d_t-2) absorbed now; (h_N+t-1, pending) next round
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.contracts.record import Status
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.device.ops.state_rows.api import row_at
from flare_ray.device.speculation.lanes import Lanes
from flare_ray.device.state.layout import Core, Phase
from flare_ray.device.state.publication import Crossing
from flare_ray.device.state.store import StateStore
from flare_ray.recipes.declaration import AbsorbRows, Drafter, Rows, TargetOutput


def clip_emitted(
    tokens: Tensor, accepted: Tensor, *, budget: Tensor, eos_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Number of tokens each lane commits (t, 1 <= t <= a + 1), and whether the last one is an EOS.

    Args:
        tokens: [B, W] int64, accepted drafts followed by the target sample; rest undefined.
        accepted: [B] int64, a.
        budget: [B] int64, output tokens still allowed; 0 = no transition.
        eos_ids: [B, 16] int64, unused places negative.
    Returns:
        ([B] int64 t, 0 exactly where budget is 0; [B] bool ended by EOS).
    """
    width = tokens.shape[1]
    rows = torch.arange(width, device=tokens.device)
    is_eos = (tokens.unsqueeze(-1) == eos_ids.unsqueeze(1)).any(-1)
    is_eos &= rows <= accepted.unsqueeze(1)
    through_eos = torch.where(is_eos, rows + 1, width + 1).amin(1)
    emitted = torch.minimum(torch.minimum(accepted + 1, through_eos), budget)
    return emitted, (emitted == through_eos) & (emitted > 0)


@dataclass(slots=True)
class Transition:
    """What one program changes in its lanes' slots.

    Attributes:
        emitted: [B] int64, t; 0 where no transition.
        consumed: [B] int64, tokens whose state this program committed.
        column: [B] int64, live state column afterwards.
        pending: [B] int64, pending token afterwards.
        ended_eos / healthy: [B] bool.
        completed: [B] bool, a pending token exists afterwards (False while a prompt is filling).
        exhausted: [B] bool, unhealthy lanes that have no token left; None where that cannot be.
    """

    emitted: Tensor
    consumed: Tensor
    column: Tensor
    pending: Tensor
    ended_eos: Tensor
    healthy: Tensor
    completed: Tensor
    exhausted: Tensor | None = None


@dataclass(slots=True)
class Outcome:
    """Slot fields after the transition, [B] int64 each, zero for inactive lanes."""

    status: Tensor
    consumed: Tensor
    generated: Tensor
    budget: Tensor
    draft_position: Tensor


def advance(store: StateStore, lanes: Lanes, move: Transition, *, keeps_pairs: bool) -> Outcome:
    """Write the lanes' mutable request state back.

    An unhealthy lane keeps its counters and ends. An inactive one writes the null slot's own zeros.

    Args:
        keeps_pairs: the program maintains drafter history (contract: R6, R8).
    """
    moved = move.healthy & lanes.active
    consumed = lanes.field(Core.CONSUMED) + move.consumed
    generated = lanes.field(Core.GENERATED) + move.emitted
    budget = lanes.field(Core.BUDGET) - move.emitted
    spent = (budget <= 0) & move.completed
    faults = ~move.healthy * Status.NONFINITE.value
    if move.exhausted is not None:
        faults = torch.where(move.exhausted, Status.NO_TOKEN.value, faults)
    status = lanes.active * (
        (move.ended_eos & moved) * Status.EOS.value
        + (spent & moved) * Status.LENGTH.value
        + faults
        + Status.ACTIVE.value
    )
    going_on = torch.where(move.completed, Phase.READY.value, Phase.FILLING.value)
    phase = torch.where(status > Status.ACTIVE.value, Phase.ENDED.value, going_on) * lanes.active
    if not keeps_pairs:
        absorbed = torch.zeros_like(consumed)
    else:
        absorbed = (consumed - 1).clamp_(min=0) if store.spec.history == "pairs" else consumed
    after = torch.stack(
        (phase, move.pending, consumed, generated, budget, move.column, absorbed), dim=1
    )
    before = lanes.core[:, Core.PHASE + 1 : Core.DRAFT_POSITION + 1]
    after[:, 1:] = torch.where(moved.unsqueeze(1), after[:, 1:], before)
    store.request.mutable().index_copy_(0, lanes.slots, after)
    return Outcome(status, after[:, 2], after[:, 3], after[:, 4], after[:, 6])


def save_tail(store: StateStore, slots: Tensor, feedback: Tensor) -> None:
    """Keep [B, H] feedback of the last committed row; `slots` [B] is the null slot where none.

    The null slot's tail stays zero: padded lanes draft from it, and what one lane computed must not
    reach another through them.
    """
    tail = store.request.tail
    if tail is not None and store.spec.tail_width:
        real = (slots != store.request.null_slot).unsqueeze(1)
        tail.index_copy_(0, slots, torch.where(real, feedback.to(tail.dtype), 0.0))


def save_sampling(store: StateStore, slots: Tensor, vector: Tensor) -> None:
    """Keep [B, Hs] head inputs of the last committed row, where snapshots may want them."""
    kept = store.request.sampling_vector
    if kept is not None:
        real = (slots != store.request.null_slot).unsqueeze(1)
        kept.index_copy_(0, slots, torch.where(real, vector.to(kept.dtype), 0.0))


def absorb_accepted(
    drafter: Drafter, store: StateStore, rows: Rows, feedback: Tensor, emitted: Tensor
) -> None:
    """Absorb what acceptance completed, from target feedback (contract: R8): pairs, or the emitted
    rows themselves.

    Args:
        rows: the verified rows; row i + 1's token completes row i's pair.
        feedback: [B, W, H].
        emitted: [B] int64, t: pairs N .. N + t - 2 are complete, rows N .. N + t - 1 committed.
    """
    width = rows.tokens.shape[1]
    if store.spec.history == "rows":
        taken = torch.arange(width, device=emitted.device) < emitted.unsqueeze(1)
        drafter.absorb(absorb_rows(rows, feedback, taken), store.groups)
        return
    if width == 1:
        return
    complete = torch.arange(1, width, device=emitted.device) < emitted.unsqueeze(1)
    drafter.absorb(
        AbsorbRows(
            tokens=rows.tokens[:, 1:],
            feedback=feedback[:, :-1],
            positions=rows.positions[:, :-1],
            valid=complete,
            slots=rows.slots,
            page_table=rows.page_table,
        ),
        store.groups,
    )


def absorb_rows(rows: Rows, feedback: Tensor, valid: Tensor) -> AbsorbRows:
    """A drafter's rows of target rows; `valid` [B, T] are those whose tokens are consumed."""
    return AbsorbRows(
        tokens=rows.tokens,
        feedback=feedback,
        positions=rows.positions,
        valid=valid,
        slots=rows.slots,
        page_table=rows.page_table,
    )


def publish_boundary(
    store: StateStore, lanes: Lanes, rows: Rows, output: TargetOutput, consumed: Tensor
) -> None:
    """Copy the state after an accepted row that ends at a page boundary (contract: M4).

    Args:
        consumed: [B] int64 rows committed by this program, 0 where none.
    """
    if store.publication is None:
        return
    start = rows.positions[:, 0]
    last = torch.div(start + consumed, PAGE_TOKENS, rounding_mode="floor") * PAGE_TOKENS
    crossed = last > start
    # a chunk ends in column 0 and only its own end can be published: the state between is gone
    if rows.prefill:
        crossed &= last == start + consumed
    row = (last - start - 1).clamp_(min=0)
    store.publication.publish(
        Crossing(
            source=lanes.slots,
            slots=torch.where(crossed, lanes.slots, store.request.null_slot),
            column=torch.zeros_like(row) if rows.prefill else row,
            epoch=lanes.epoch,
            consumed=last,
            feedback=row_at(output.feedback, row)[:, : store.spec.tail_width],
            sampling=row_at(output.sampling, row),
        ),
        store.groups,
    )

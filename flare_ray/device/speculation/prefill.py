"""Prefill: consume prompt chunks of several lanes; the last chunk makes a token pending.

    1. target on the chunk's rows, states end in column 0
    2. absorb the drafter's pairs, shifted by one: the chunk's first token completes the pair whose
       hidden state the previous chunk saved as tail; the pair of the chunk's last row stays open
    3. at the prompt's end sample the first token (or take the one a resumed request already had),
       check it against EOS and budget
    4. advance the slot, save the tail, publish a chunk end on a page boundary, write the record

A prompt of P tokens leaves P consumed tokens and P - 1 pairs, however it was cut (contract: R8).
A lane runs only if its slot is still filling and has consumed exactly `start` tokens, so a chunk
of a dead request or one that was sent twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flare_ray.contracts.record import Flag
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.device.ops.state_rows.api import row_at
from flare_ray.device.sampling.masks import apply_token_mask
from flare_ray.device.sampling.philox import uniforms
from flare_ray.device.sampling.scores import write_scores
from flare_ray.device.speculation.acceptance import (
    row_health,
    sample_rows,
    scored_logits,
)
from flare_ray.device.speculation.commit import (
    Transition,
    absorb_rows,
    advance,
    publish_boundary,
    save_sampling,
    save_tail,
)
from flare_ray.device.speculation.inputs import ChunkField, HostFacts, PrefillInputs
from flare_ray.device.speculation.lanes import Lanes, Planned, coupling_of, open_lanes
from flare_ray.device.speculation.logits import adjusted_logits, count_consumed, count_emitted
from flare_ray.device.speculation.record import Emission, write_record
from flare_ray.device.speculation.round import Model
from flare_ray.device.state.layout import KEYS, Core, Phase
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import AbsorbRows, Rows, TargetOutput
from flare_ray.rng import OFFSET_STRIDE, RngDomain

SCORED_ROWS = 32
"""Prompt rows whose logits exist at once."""


@dataclass(slots=True)
class PrefillScratch:
    """record: [B, RECORD_FIELDS] int64 output; positions: [1, T] int64, 0 .. T - 1, constant;
    scores: [B, 1, SCORE_WORDS], prompt_scores: [B, T or 0, SCORE_WORDS] int32 outputs."""

    record: Tensor
    positions: Tensor
    scores: Tensor
    prompt_scores: Tensor


@dataclass(slots=True)
class FirstToken:
    """Stage 3's result.

    token: [B] int64 pending from now on; final (the prompt has ended), sampled, healthy: [B] bool;
    scored: [B, 1, V] what log-probabilities are taken from.
    exhausted: as in `Verdict`.
    """

    token: Tensor
    final: Tensor
    sampled: Tensor
    healthy: Tensor
    scored: Tensor
    exhausted: Tensor | None = None


def run_prefill(
    model: Model,
    shape: GraphShape,
    inputs: PrefillInputs,
    scratch: PrefillScratch,
    facts: HostFacts,
) -> None:
    """Execute one prefill program on static buffers."""
    planned = inputs.lanes
    wanted = Planned(
        planned[:, ChunkField.SLOT], planned[:, ChunkField.EPOCH], planned[:, ChunkField.START]
    )
    lanes = open_lanes(model.store.request, wanted, Phase.FILLING, facts)
    rows = _chunk_rows(lanes, planned, scratch.positions[:, : facts.rows])
    output = model.target.forward(rows, model.store.groups)
    if shape.speculation:
        _absorb_chunk(model, lanes, rows, output)
    chunk = _Chunk(lanes, rows, output, facts)
    if shape.kind is GraphKind.SCORED_PREFILL:
        _score_prompt(model, planned, scratch, chunk)
    first = _first_token(model, inputs, chunk)
    _finish(model, shape, inputs, scratch, (chunk, first))


def run_resume(
    model: Model,
    shape: GraphShape,
    inputs: PrefillInputs,
    scratch: PrefillScratch,
    facts: HostFacts,
) -> None:
    """Go on where a restored snapshot ends, as a chunk without rows: its head input gives the first
    token, or a resumed request brings the one it had pending (contract: M5)."""
    planned, request = inputs.lanes, model.store.request
    wanted = Planned(
        planned[:, ChunkField.SLOT], planned[:, ChunkField.EPOCH], planned[:, ChunkField.START]
    )
    lanes = open_lanes(request, wanted, Phase.FILLING, facts)
    if request.sampling_vector is None:
        raise ContractViolation("a resume was prepared without snapshots")
    vector = request.sampling_vector.index_select(0, lanes.slots)
    tail = vector if request.tail is None else request.tail.index_select(0, lanes.slots)
    rows = _no_rows(lanes)
    logits = model.target.head(vector).unsqueeze(1)
    output = TargetOutput(logits, feedback=tail.unsqueeze(1), sampling=vector.unsqueeze(1))
    # no row ends here: what the snapshot holds is published already
    chunk = _Chunk(lanes, rows, output, replace(facts, publishes=False))
    first = _first_token(model, inputs, chunk)
    _finish(model, shape, inputs, scratch, (chunk, first))


def _no_rows(lanes: Lanes) -> Rows:
    """One row a lane, at the last consumed position, that takes no part."""
    none = torch.zeros_like(lanes.slots)
    return Rows(
        tokens=none.unsqueeze(1),
        slots=lanes.slots,
        positions=(lanes.field(Core.CONSUMED) - 1).clamp_(min=0).unsqueeze(1),
        valid=torch.zeros_like(lanes.active).unsqueeze(1),
        lengths=none,
        column=lanes.field(Core.COLUMN),
        page_table=lanes.page_table,
        last_only=True,
        prefill=True,
    )


@dataclass(slots=True)
class _Chunk:
    lanes: Lanes
    rows: Rows
    output: TargetOutput
    facts: HostFacts


def _chunk_rows(lanes: Lanes, planned: Tensor, offsets: Tensor) -> Rows:
    lengths = planned[:, ChunkField.LENGTH] * lanes.active
    return Rows(
        tokens=planned[:, ChunkField.TOKENS : ChunkField.TOKENS + offsets.shape[1]],
        slots=lanes.slots,
        positions=lanes.field(Core.CONSUMED).unsqueeze(1) + offsets,
        valid=offsets < lengths.unsqueeze(1),
        lengths=lengths,
        column=lanes.field(Core.COLUMN),
        page_table=lanes.page_table,
        last_only=True,
        prefill=True,
    )


def _score_prompt(model: Model, planned: Tensor, scratch: PrefillScratch, chunk: _Chunk) -> None:
    """Scores of the prompt token behind every row, by the model's own distribution (contract: K4).

    Rows pass through the head a few at a time: their logits are the largest tensor of a program.
    """
    rows, vectors = chunk.rows, chunk.output.sampling
    count = rows.tokens.shape[1]
    behind = torch.cat((rows.tokens[:, 1:], planned[:, ChunkField.NEXT, None]), dim=1)
    last = scratch.positions[:, :count] == (rows.lengths - 1).unsqueeze(1)
    following = torch.where(last, planned[:, ChunkField.NEXT, None], behind).clamp_(min=0)
    top = max(chunk.facts.filters.max_prompt_logprobs, 0)
    for start in range(0, count, SCORED_ROWS):
        part = vectors[:, start : start + SCORED_ROWS]
        logits = model.target.head(part.flatten(0, 1)).unflatten(0, part.shape[:2])
        end = start + part.shape[1]
        write_scores(logits, following[:, start:end], top, scratch.prompt_scores[:, start:end])


def _absorb_chunk(model: Model, lanes: Lanes, rows: Rows, output: TargetOutput) -> None:
    tail = model.store.request.tail
    if model.drafter is None or tail is None:
        raise ContractViolation("a speculative prefill was prepared without a drafter")
    if model.store.spec.history == "rows":
        model.drafter.absorb(absorb_rows(rows, output.feedback, rows.valid), model.store.groups)
        return
    before = tail.index_select(0, lanes.slots).unsqueeze(1).to(output.feedback.dtype)
    positions = rows.positions - 1
    model.drafter.absorb(
        AbsorbRows(
            tokens=rows.tokens,
            feedback=torch.cat((before, output.feedback[:, :-1]), dim=1),
            positions=positions.clamp(min=0),
            valid=rows.valid & (positions >= 0),
            slots=lanes.slots,
            page_table=rows.page_table,
        ),
        model.store.groups,
    )


def _first_token(model: Model, inputs: PrefillInputs, chunk: _Chunk) -> FirstToken:
    """Stage 3; its draw is that of a round in which the last prompt token was pending.

    The prompt's last chunk is counted first: the first token is penalised for all of it.
    """
    planned, lanes, rows, facts = inputs.lanes, chunk.lanes, chunk.rows, chunk.facts
    count_consumed(rows, model.store.request, facts.filters)
    given = planned[:, ChunkField.PENDING]
    final = (planned[:, ChunkField.FINAL] > 0) & lanes.active
    if not facts.sampled:
        none, all_ = torch.zeros_like(final), torch.ones_like(final)
        return FirstToken(given.clamp(min=0), final, none, all_, chunk.output.logits)
    logits = adjusted_logits(chunk.output.logits, rows, model.store.request, facts.filters)
    if facts.masked:
        logits = apply_token_mask(logits, inputs.masks, planned[:, ChunkField.MASKED] > 0)
    sampled = final & (given < 0)
    health = row_health(logits, sampled.unsqueeze(1), may_exhaust=facts.may_exhaust)
    consumed = lanes.field(Core.CONSUMED) + rows.lengths
    offset = (consumed - 1).clamp_(min=0) * OFFSET_STRIDE
    draws = uniforms(lanes.core[:, KEYS][:, RngDomain.SAMPLE], offset, 1)[:, 0]
    coupling = coupling_of(lanes, (consumed - 1).clamp_(min=0))
    drawn = sample_rows(logits, params=lanes.params, draws=draws, coupling=coupling)
    token = torch.where(sampled, drawn, given.clamp(min=0))
    scored = scored_logits(chunk.output.logits, logits, lanes.params, facts.filters)
    return FirstToken(token, final, sampled, health.healthy, scored, health.exhausted)


def _account(model: Model, scratch: PrefillScratch, chunk: _Chunk, first: FirstToken) -> None:
    """Scores of the token that became pending, and its place among the counts."""
    filters, token = chunk.facts.filters, first.token.unsqueeze(1)
    if filters.max_top_logprobs >= 0:
        write_scores(first.scored, token, filters.max_top_logprobs, scratch.scores)
    pending = (first.final & first.healthy).to(torch.int64)
    count_emitted(chunk.rows, token, pending, model.store.request, filters)


def _finish(
    model: Model,
    shape: GraphShape,
    inputs: PrefillInputs,
    scratch: PrefillScratch,
    done: tuple[_Chunk, FirstToken],
) -> None:
    """Stage 4."""
    chunk, first = done
    planned, lanes, rows, final = inputs.lanes, chunk.lanes, chunk.rows, first.final
    emitted = (first.sampled & first.healthy).to(torch.int64)
    is_eos = (first.token.unsqueeze(1) == lanes.eos_ids).any(1)
    outcome = advance(
        model.store,
        lanes,
        Transition(
            emitted=emitted,
            consumed=rows.lengths,
            column=torch.zeros_like(rows.lengths),
            pending=first.token,
            ended_eos=is_eos & final,
            healthy=first.healthy,
            completed=final,
            exhausted=first.exhausted,
        ),
        keeps_pairs=shape.speculation,
    )
    store = model.store
    _account(model, scratch, chunk, first)
    model.target.commit(rows, rows.lengths, store.groups)
    last = (rows.lengths - 1).clamp_(min=0)
    save_sampling(store, lanes.slots, row_at(chunk.output.sampling, last))
    if shape.speculation:
        save_tail(store, lanes.slots, row_at(chunk.output.feedback, last))
    if chunk.facts.publishes:
        publish_boundary(store, lanes, rows, chunk.output, rows.lengths)
    none = torch.zeros_like(emitted)
    flags = lanes.active * (
        (planned[:, ChunkField.MASKED] > 0) * Flag.MASKED.value
        + first.sampled * Flag.FIRST_TOKEN.value
        + Flag.PREFILL.value
    )
    write_record(
        scratch.record,
        lanes,
        outcome,
        Emission(
            round_id=planned[:, ChunkField.ROUND],
            drafted=none,
            offered=none,
            accepted=none,
            emitted=emitted,
            copy_bits=none,
            width=none,
            flags=flags,
            tokens=first.token.unsqueeze(1),
        ),
    )

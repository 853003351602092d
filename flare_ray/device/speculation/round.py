"""One round: draft, verify, accept, commit (contract: T1-T6).

    1. draft    complete the pair (tail, p), propose D tokens, keep q; copies take their places, and
                where every draft on offer is one (host-known), nothing is proposed
    2. verify   target on [p, d0 .. dW-2], W rows a lane, logits of every row
    3. accept   p per row -> chain acceptance over the drafts the lane offers -> a, target sample
    4. commit   clip to t; advance the slot; absorb the completed pairs; publish a crossed boundary;
                write the record

How many drafts a lane offers is decided on the device: K = min(ceiling, W - 1, budget - 1). More
than budget - 1 could never be emitted beside the target sample, so they are not verified either,
and the pages a lane touches never reach beyond prompt plus budget. A packed round verifies P rows
in all; within those bounds the drafter's forecasts assign them (packing.py).

A masked round of drafts is the same program in two parts (contract: G5): after 1. the host reads
the drafts, writes the mask behind each and says how many of them may be verified.

A width-one round of the speculative family is the same program without 1.'s proposals and 3.'s
chain; the ordinary family also leaves out every drafter step (contract: R6, C6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.contracts.record import Flag
from flare_ray.contracts.shapes import GraphShape
from flare_ray.device.ops.state_rows.api import row_at
from flare_ray.device.sampling.masks import allowed_tokens
from flare_ray.device.sampling.scores import write_scores
from flare_ray.device.speculation.acceptance import (
    Verdict,
    accept_chain,
    row_health,
    sample_rows,
    scored_logits,
)
from flare_ray.device.speculation.barrier import Candidates, obey_barrier
from flare_ray.device.speculation.commit import (
    Outcome,
    Transition,
    absorb_accepted,
    advance,
    clip_emitted,
    publish_boundary,
    save_sampling,
    save_tail,
)
from flare_ray.device.speculation.inputs import HostFacts, LaneField, RoundInputs
from flare_ray.device.speculation.lanes import Draws, Lanes, Planned, open_lanes, round_draws
from flare_ray.device.speculation.logits import adjusted_logits, count_emitted
from flare_ray.device.speculation.packing import assigned_prefixes, packed_forward
from flare_ray.device.speculation.proposal import Proposals
from flare_ray.device.speculation.record import Emission, write_record
from flare_ray.device.state.layout import Core, Phase
from flare_ray.device.state.store import StateStore
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import Drafter, ProposalStart, Rows, Target, TargetOutput


@dataclass(slots=True)
class Model:
    """What a recipe supplied for this rank; `drafter` is None where none is prepared."""

    target: Target
    drafter: Drafter | None
    store: StateStore


@dataclass(slots=True)
class RoundScratch:
    """Buffers of one shape that outlive an operator but not the round.

    Attributes:
        q: [B, D, V] float32.
        record: [B, RECORD_FIELDS] int64, the program's output.
        positions: [1, W] int64, 0 .. W - 1, constant.
        scores: [B, W, SCORE_WORDS] int32, output where a lane asks for log-probabilities.
    """

    q: Tensor
    record: Tensor
    positions: Tensor
    scores: Tensor


@dataclass(slots=True)
class Drafted:
    """What stage 1 hands over.

    Attributes:
        barrier_copies: host-known: the answer at the barrier replaces drafts.
    """

    stage: _Stage
    candidates: Candidates
    barrier_copies: bool = False


def run_round(
    model: Model, shape: GraphShape, inputs: RoundInputs, scratch: RoundScratch, facts: HostFacts
) -> None:
    """Execute one decode or speculative round on static buffers."""
    drafted = draft_round(model, shape, inputs, scratch, facts)
    verify_round(model, shape, inputs, scratch, drafted)


def draft_round(
    model: Model, shape: GraphShape, inputs: RoundInputs, scratch: RoundScratch, facts: HostFacts
) -> Drafted:
    """Stage 1 alone. What it returns is read by `verify_round` of the same execution; two captured
    parts share a pool, in which it stays alive."""
    planned = inputs.lanes
    wanted = Planned(planned[:, LaneField.SLOT], planned[:, LaneField.EPOCH])
    lanes = open_lanes(model.store.request, wanted, Phase.READY, facts)
    draws = round_draws(lanes, shape.draft_tokens)
    stage = _Stage(lanes, draws, facts)
    return Drafted(stage, _draft(model, shape, inputs, scratch, stage))


def verify_round(
    model: Model, shape: GraphShape, inputs: RoundInputs, scratch: RoundScratch, drafted: Drafted
) -> None:
    """Stages 2 to 4, behind the barrier where there is one."""
    planned, stage, candidates = inputs.lanes, drafted.stage, drafted.candidates
    lanes, facts = stage.lanes, stage.facts
    allowed = None
    if facts.masked:
        constrained = planned[:, LaneField.MASKED] > 0
        allowed = allowed_tokens(inputs.masks, constrained, scratch.q.shape[-1])
    if allowed is not None and shape.has_barrier:
        copies = drafted.barrier_copies
        candidates = obey_barrier(candidates, planned, scratch.q, allowed, copies=copies)
    rows = _verify_rows(lanes, candidates, scratch.positions)
    if shape.packed_capacity:
        output = packed_forward(model.target, rows, model.store, capacity=shape.packed_capacity)
    else:
        output = model.target.forward(rows, model.store.groups)
    work = _Verification(rows, candidates, lanes, stage.draws, facts, allowed)
    verdict = _accept(model, output, scratch, work)
    outcome, emitted = _commit(model, shape, lanes, _Verified(rows, output, verdict))
    if facts.filters.max_top_logprobs >= 0:
        top = facts.filters.max_top_logprobs
        write_scores(verdict.scored, verdict.tokens, top, scratch.scores)
    count_emitted(rows, verdict.tokens, emitted, model.store.request, facts.filters)
    if facts.publishes:
        publish_boundary(model.store, lanes, rows, output, emitted)
    emission = _emission(shape, planned, lanes, candidates, _Done(verdict, emitted))
    write_record(scratch.record, lanes, outcome, emission)


@dataclass(slots=True)
class _Stage:
    lanes: Lanes
    draws: Draws
    facts: HostFacts


@dataclass(slots=True)
class _Verification:
    rows: Rows
    candidates: Candidates
    lanes: Lanes
    draws: Draws
    facts: HostFacts
    allowed: Tensor | None


@dataclass(slots=True)
class _Done:
    verdict: Verdict
    emitted: Tensor


@dataclass(slots=True)
class _Verified:
    rows: Rows
    output: TargetOutput
    verdict: Verdict


def _draft(
    model: Model, shape: GraphShape, inputs: RoundInputs, scratch: RoundScratch, stage: _Stage
) -> Candidates:
    """Stage 1; without drafter state there is nothing to absorb and nothing to propose."""
    lanes, depth = stage.lanes, shape.draft_tokens
    planned = inputs.lanes
    copies = planned[:, LaneField.COPIES :] if stage.facts.copies and depth else None
    sink = Proposals(scratch.q, lanes.params, stage.draws, copies)
    if shape.speculation:
        proposed = depth if stage.facts.drafts else 0
        _propose(model, lanes, sink, proposed)
        if proposed < depth:
            if copies is None:
                raise ContractViolation("drafts are copied alone, and no lane brings copies")
            sink.copy(depth)
    room = torch.minimum(planned[:, LaneField.CEILING], lanes.field(Core.BUDGET) - 1)
    offered = room.clamp_(0, shape.verify_width - 1)
    if shape.packed_capacity:
        offered = assigned_prefixes(
            sink.forecasts, offered, lanes.active, capacity=shape.packed_capacity
        )
    if depth == 0:
        return Candidates(planned.new_zeros((planned.shape[0], 0)), offered, None)
    return Candidates(sink.stacked()[:, : shape.verify_width - 1], offered, copies)


def _propose(model: Model, lanes: Lanes, sink: Proposals, depth: int) -> None:
    tail = model.store.request.tail
    if model.drafter is None or tail is None:
        raise ContractViolation("a speculative shape was prepared without a drafter")
    model.drafter.propose(
        ProposalStart(
            pending=lanes.field(Core.PENDING),
            tail=tail.index_select(0, lanes.slots),
            consumed=lanes.field(Core.CONSUMED),
            active=lanes.active,
            slots=lanes.slots,
            page_table=lanes.page_table,
            depth=depth,
        ),
        model.store.groups,
        sink,
    )
    if len(sink.tokens) != depth:
        raise ContractViolation(f"the drafter drew {len(sink.tokens)} tokens of depth {depth}")


def _verify_rows(lanes: Lanes, candidates: Candidates, offsets: Tensor) -> Rows:
    pending = lanes.field(Core.PENDING).unsqueeze(1)
    valid = (offsets <= candidates.offered.unsqueeze(1)) & lanes.active.unsqueeze(1)
    return Rows(
        tokens=torch.cat((pending, candidates.drafts), dim=1),
        slots=lanes.slots,
        positions=lanes.field(Core.CONSUMED).unsqueeze(1) + offsets,
        valid=valid,
        lengths=valid.sum(1),
        column=lanes.field(Core.COLUMN),
        page_table=lanes.page_table,
        last_only=False,
        prefill=False,
    )


def _accept(
    model: Model,
    output: TargetOutput,
    scratch: RoundScratch,
    work: _Verification,
) -> Verdict:
    """Stage 3."""
    logits = adjusted_logits(output.logits, work.rows, model.store.request, work.facts.filters)
    if work.allowed is not None:
        logits = torch.where(work.allowed, logits, float("-inf"))
    health = row_health(logits, work.rows.valid, may_exhaust=work.facts.may_exhaust)
    params, width = work.lanes.params, logits.shape[1]
    scored = scored_logits(output.logits, logits, params, work.facts.filters)
    if width == 1:
        token = sample_rows(
            logits, params=params, draws=work.draws.sample[:, 0], coupling=work.draws.coupling
        )
        none = torch.zeros_like(token)
        return Verdict(none, token.unsqueeze(1), health.healthy, scored, health.exhausted)
    verdict = accept_chain(
        logits,
        scratch.q[:, : width - 1],
        work.candidates.drafts,
        work.candidates.offered,
        params=params,
        draws=work.draws,
    )
    if health.usable is not None:
        # Not by offering less: whether a row is empty depends on the draft in front of it.
        verdict.accepted = torch.minimum(verdict.accepted, health.usable)
    verdict.healthy, verdict.exhausted = health.healthy, health.exhausted
    verdict.scored = scored
    return verdict


def _commit(
    model: Model, shape: GraphShape, lanes: Lanes, done: _Verified
) -> tuple[Outcome, Tensor]:
    """Stage 4; returns the slots' fields afterwards and t."""
    rows, output, verdict = done.rows, done.output, done.verdict
    emitted, ended_eos = clip_emitted(
        verdict.tokens,
        verdict.accepted,
        budget=lanes.field(Core.BUDGET) * verdict.healthy,
        eos_ids=lanes.eos_ids,
    )
    last = (emitted - 1).clamp_(min=0)
    outcome = advance(
        model.store,
        lanes,
        Transition(
            emitted=emitted,
            consumed=emitted,
            column=last,
            pending=verdict.tokens.gather(1, last.unsqueeze(1)).squeeze(1),
            ended_eos=ended_eos,
            healthy=verdict.healthy,
            completed=lanes.active,
            exhausted=verdict.exhausted,
        ),
        keeps_pairs=shape.speculation,
    )
    model.target.commit(rows, emitted, model.store.groups)
    committed = torch.where(emitted > 0, lanes.slots, model.store.request.null_slot)
    if shape.speculation and model.drafter is not None:
        absorb_accepted(model.drafter, model.store, rows, output.feedback, emitted)
        save_tail(model.store, committed, row_at(output.feedback, last))
    save_sampling(model.store, committed, row_at(output.sampling, last))
    return outcome, emitted


def _emission(
    shape: GraphShape, planned: Tensor, lanes: Lanes, candidates: Candidates, done: _Done
) -> Emission:
    """Counts of the round; accepted is the chain's own count, before EOS and budget clipped it."""
    verdict, emitted = done.verdict, done.emitted
    return Emission(
        round_id=planned[:, LaneField.ROUND],
        drafted=lanes.active * shape.draft_tokens,
        offered=candidates.offered,
        accepted=verdict.accepted * (emitted > 0),
        emitted=emitted,
        copy_bits=_copy_bits(candidates),
        width=lanes.active * shape.verify_width,
        flags=planned[:, LaneField.MASKED] * lanes.active * Flag.MASKED.value,
        tokens=verdict.tokens,
    )


def _copy_bits(candidates: Candidates) -> Tensor:
    """Bit k = offered draft k was a copy."""
    if candidates.copies is None:
        return torch.zeros_like(candidates.offered)
    depths = torch.arange(candidates.copies.shape[1], device=candidates.copies.device)
    is_copy = (candidates.copies >= 0) & (depths < candidates.offered.unsqueeze(1))
    return (is_copy * (1 << depths)).sum(1)

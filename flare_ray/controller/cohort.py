"""Which program runs next, with which lanes (contract: C1, T6).

Turns: when both prompts and decoding requests have work, prefill and rounds alternate; so neither
waits longer than one program of the other, but prompts where an inter-token target holds them back
(`pacing`). Prompts take turns among themselves, a chunk each, so a
long prompt delays a short one by one chunk at a time; restored prompts, which need one short
program, go first, but never twice in a row while others have chunks left. Decoding requests all
share the round; if there are more than a round has lanes, those that waited longest go first. So of
two requests that decode side by side none takes part in more than one round more than the other,
and who holds a slot and is not short of pages gives it back within `residence_bound` programs.
Constrained requests share rounds with the others, which are masked rounds then, or have rounds of
their own in turn with theirs (`grammar.own_rounds`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from flare_ray.contracts.plan import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_IDS,
    MAX_LOGIT_RULES,
    MAX_SHARED_PAGES,
    FreedMemory,
    LanePlan,
    PageGrant,
    PrefillLane,
    RoundPlan,
    SlotInit,
    SlotRestore,
    SnapshotSave,
)
from flare_ray.contracts.record import Status
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS, GraphShape
from flare_ray.controller.admission import Admission
from flare_ray.controller.catalog import ServedCatalog
from flare_ray.controller.grammar.masks import MaskWriter, OpenMasks
from flare_ray.controller.live import LiveRequest, Phase, Unanswered
from flare_ray.controller.pacing import PrefillGate
from flare_ray.controller.paging.pool import pages_for
from flare_ray.controller.paging.snapshots import Capture
from flare_ray.controller.ports import RoundResult
from flare_ray.controller.preemption import Growth
from flare_ray.controller.sampling import logit_rules, seen_bits
from flare_ray.controller.verification import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    VerificationPolicy,
)

PROGRAM_OVERHEAD_ROWS = 32
"""Fixed cost of a prefill program in rows, for weighing one wide program against several narrow
ones. A guess: the two differ little where it matters."""


# Plain values, as in `harvest`.
_ACTIVE = int(Status.ACTIVE)
_PREFILL = Phase.PREFILL
RULE_BYTES = 24
WORD_TOKEN_BYTES = 5
PLAN_RULE_BYTES = (
    RULE_BYTES * MAX_LOGIT_RULES + WORD_TOKEN_BYTES * MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
)
"""Encoded logit rules and banned words that one plan may hand over: those of the largest request,
which fit one message beside the largest chunk and MAX_SHARED_PAGES page ids."""


def residence_bound(
    prompt_tokens: int, max_tokens: int, *, slots: int, chunk: int, rounds: int = 1
) -> int:
    """Programs within which a request that got its slot ends, if pages last.

    Every other holder may have a chunk before each of its own, with a resume and rounds between,
    and a round emits a token at least, with a program for prompts before each.

    Args:
        prompt_tokens: what it has to consume first.
        slots: holders of a slot, itself included.
        chunk: least rows of a prefill program's lane.
        rounds: most rounds between two programs for prompts; MOST_DEFERRED_ROUNDS more than one
            under an inter-token target.
    """
    # A chunk may end early where a snapshot is kept: at the last page boundary, and at the end.
    chunks = -(-prompt_tokens // chunk) + 2
    return 2 * (1 + rounds) * slots * chunks + 2 * max_tokens + 2


class SubmittedRound(msgspec.Struct, frozen=True):
    """A planned program and the requests behind its lanes, in plan order.

    Attributes:
        decision: why the width was chosen; None for a prefill.
        started_ns: when its planning began, or the harvest that it follows without a pause.
        captures: snapshots that its chunks leave.
        deferred: prompts were held back for it, for the sake of the inter-token target.
    """

    plan: RoundPlan
    lanes: tuple[LiveRequest, ...]
    decision: Decision | None
    started_ns: int
    captures: tuple[Capture, ...] = ()
    deferred: bool = False


@dataclass(slots=True)
class _Chunks:
    """Parts of a prefill's plan as its lanes are added."""

    masks: OpenMasks
    inits: list[SlotInit] = field(default_factory=list)
    restores: list[SlotRestore] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    lanes: list[PrefillLane] = field(default_factory=list)
    saves: list[SnapshotSave] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    most_pages: int = 0


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What a planner holds to.

    Attributes:
        eos_ids: the checkpoint's terminal tokens.
        eager: programs cost what their lanes use, not what they were captured for.
        own_rounds: constrained requests never share a round with others.
        gate: holds prompts back for an inter-token target; None = they alternate with rounds.
        copies_alone: the drafter's own drafts are never offered.
    """

    eos_ids: tuple[int, ...]
    eager: bool
    own_rounds: bool
    gate: PrefillGate | None = None
    copies_alone: bool = False


class Planner:
    """Builds round plans from the running requests; mutates their progress as planned.

    Attributes:
        catalog: programs to choose from; may be replaced between two plans.
    """

    def __init__(
        self,
        admission: Admission,
        catalog: ServedCatalog,
        policy: VerificationPolicy,
        *,
        masks: MaskWriter,
        rules: PlanRules,
    ) -> None:
        self._admission = admission
        self._snapshots = admission.snapshots
        self._growth = Growth(admission)
        self.catalog = catalog
        self._policy = policy
        self._eos_ids = rules.eos_ids
        self._eager = rules.eager
        self._own_rounds = rules.own_rounds
        self._gate = rules.gate
        self._copies_alone = rules.copies_alone
        self._masks = masks
        self._next_round = 0
        self._prefill_was_last = False
        self._resume_was_last = False
        self._last_round_of: dict[int, int] = {}
        self._table_pages = pages_for(admission.limits.context_tokens + MAX_WIDTH)

    def next_round(self, now_ns: int) -> SubmittedRound | None:
        """The next program, or None if nobody has work for one."""
        running = self._admission.running
        decoding = self._decoding(running.values())
        # May preempt, also those whose prompt has work.
        decoding = self._growth.cover(
            decoding, lambda live: live.consumed_bound + self._ceiling(live) + 1
        )
        prompts = [live for live in running.values() if live.phase is _PREFILL]
        if not prompts and not decoding:
            return None
        for live in prompts:
            if live.last_chunk_round < 0:
                # Turns count from now: a newcomer passes who has just had a chunk, and only them.
                live.last_chunk_round = self._next_round - 1
        deferred = self._take_turn(bool(prompts), bool(decoding))
        if self._prefill_was_last:
            plan, lanes, captures = self._plan_prefill(prompts)
            decision = None
        else:
            captures = ()
            plan, lanes = self._plan_round(decoding)
            decision = self._policy.decision()
        self._next_round += 1
        return SubmittedRound(plan, lanes, decision, now_ns, captures, deferred)

    def _take_turn(self, prompts: bool, decoding: bool) -> bool:
        """Say in `_prefill_was_last` whose program is next; whether prompts were held back."""
        their_turn = prompts and not (decoding and self._prefill_was_last)
        held = False
        if self._gate is not None:
            if not decoding:
                self._gate.alone()
            elif their_turn:
                held = not self._gate.admits()
        self._prefill_was_last = their_turn and not held
        return held

    def _decoding(self, running: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Requests of the coming round.

        While a round with lanes that await its tokens is unanswered none is queued behind it:
        without these lanes it would cost nearly as much and take them half as far.
        """
        decoding = []
        for live in running:
            if live.may_decode:
                decoding.append(live)
            elif not self._own_rounds and live.awaits_tokens:
                return []
        if not self._own_rounds:
            return decoding
        mine = [live for live in decoding if live.matcher is not None]
        others = [live for live in decoding if live.matcher is None]
        if not mine or not others:
            return decoding
        return min(mine, others, key=lambda group: min(map(self._last_round, group)))

    def _last_round(self, live: LiveRequest) -> int:
        return self._last_round_of.get(live.uid, -1)

    def harvested(self, planned: SubmittedRound, result: RoundResult, cost_ns: int) -> None:
        """A program has run; `cost_ns` is all the time it took, host gap included."""
        plan, lanes, gate = planned.plan, result.lanes, self._gate
        if plan.prefill:
            if gate is not None:
                gate.prompts_done(cost_ns)
            return
        alive = sum([lane.status & _ACTIVE for lane in lanes])
        if not alive:
            return  # behind everyone's last round it may be skipped: its cost tells nothing
        copied = any(lane.copy_sources for lane in plan.lanes)
        sources = tuple(lane.copy_sources for lane in plan.lanes) if copied else ()
        alone = copied and plan.copies_alone
        round_ = CompletedRound(
            plan.shape, lanes, sources, copies_alone=alone, is_usual=result.is_usual
        )
        self._policy.observe(round_, cost_ns)
        if gate is not None:
            gate.round_done(cost_ns, emitted=sum(lane.emitted for lane in lanes), lanes=alive)

    def forget(self, live: LiveRequest) -> None:
        """The request has ended."""
        self._policy.forget(live.uid)
        self._last_round_of.pop(live.uid, None)

    # Prefill.

    def _plan_prefill(
        self, prompts: list[LiveRequest]
    ) -> tuple[RoundPlan, tuple[LiveRequest, ...], tuple[Capture, ...]]:
        whole = [live for live in prompts if not live.prompt_left]
        left = [live for live in prompts if live.prompt_left]
        resumes = self._resume_was_last = bool(whole) and not (left and self._resume_was_last)
        prompts = whole if resumes else left
        prompts.sort(key=lambda live: (live.last_chunk_round, live.started))
        freed = self._freed()
        shape = self._resume_shape(len(whole)) if resumes else self._chunk_shape(prompts)
        vocab_bytes = self._admission.limits.vocab_size // 8 + 1
        chosen = _within_message(prompts[: shape.batch_capacity], vocab_bytes)
        work = _Chunks(self._masks.open(self._next_round))
        for index, live in enumerate(chosen):
            self._plan_chunk(live, index, shape, work)
        plan = RoundPlan(
            round_id=self._next_round,
            shape=shape,
            inits=tuple(work.inits),
            grants=tuple(work.grants),
            prefill=tuple(work.lanes),
            context_pages=work.most_pages,
            mask_block=work.masks.name,
            mask_rows=work.masks.num_rows,
            saves=self._snapshots.take_saves(),
            restores=tuple(work.restores),
            captures=tuple(work.saves),
            freed=freed,
        )
        return plan, chosen, tuple(work.captures)

    def _plan_chunk(self, live: LiveRequest, index: int, shape: GraphShape, work: _Chunks) -> None:
        """Add a request's next prompt tokens to a prefill, as its lane number `index`."""
        start = live.planned_tokens
        end = start + min(live.prompt_left, shape.token_capacity)
        end = self._snapshots.chunk_end(live, end)
        if not live.started:
            work.inits.append(self._slot_init(live))
            shared = tuple(self._admission.pool.pages_of(live.uid))
            if shared:
                work.grants.append(PageGrant(live.slot, 0, shared))
        self._grant(live, end, work.grants)
        if not live.started:
            live.started = True
            restore = self._snapshots.restore(live)
            if restore is not None:
                work.restores.append(restore)
        work.most_pages = max(work.most_pages, pages_for(end))
        final = end == live.prefill_length
        tokens = tuple(live.chain.tokens[start:end])
        pending = live.pending if final else -1
        behind = -1 if final else live.chain.tokens[end]
        row = work.masks.take(live, 1, filled=True) if final and pending < 0 else -1
        work.lanes.append(
            PrefillLane(
                live.slot, live.epoch, start, tokens, final, pending, row, next_token=behind
            )
        )
        captured = self._snapshots.capture(live, end)
        if captured is not None:
            save, snapshot = captured
            work.saves.append(save)
            work.captures.append(Capture(index, snapshot))
        live.planned_tokens = end
        live.last_chunk_round = self._next_round
        live.in_flight.append(Unanswered(0, int(final and pending < 0)))
        if final:
            live.phase = Phase.DECODE

    def _resume_shape(self, lanes: int) -> GraphShape:
        """The smallest program for requests whose whole prompt was restored, or the largest."""
        fits = (shape for shape in self.catalog.resume if shape.batch_capacity >= lanes)
        return next(fits, self.catalog.resume[-1])

    def _chunk_shape(self, prompts: list[LiveRequest]) -> GraphShape:
        """The program for the head of `prompts`; those of the other kind leave the list."""
        scored = prompts[0].scores_prompt
        prompts[:] = [live for live in prompts if live.scores_prompt is scored]
        return self.catalog.scored[0] if scored else self._prefill_shape(prompts)

    def _prefill_shape(self, prompts: list[LiveRequest]) -> GraphShape:
        """The program with the most useful rows for its time; the head of `prompts` is always in.

        A captured program runs all its rows, an eager one as many per lane as its longest chunk.
        """
        best, best_rate = self.catalog.prefill[0], 0.0
        for shape in self.catalog.prefill:
            chunks = [
                min(live.prompt_left, shape.token_capacity)
                for live in prompts[: shape.batch_capacity]
            ]
            longest = max(chunks) if self._eager else shape.token_capacity
            rows = shape.batch_capacity * longest + PROGRAM_OVERHEAD_ROWS
            rate = sum(chunks) / rows
            if rate > best_rate:
                best, best_rate = shape, rate
        return best

    def _slot_init(self, live: LiveRequest) -> SlotInit:
        request, sampling = live.request, live.request.sampling
        return SlotInit(
            slot=live.slot,
            epoch=live.epoch,
            uid=live.uid,
            seed=sampling.seed,
            budget=request.max_tokens - live.generated_base,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            eos_ids=() if request.ignore_eos else self._eos_ids,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            rules=logit_rules(request, self._eos_ids),
            bad_words=sampling.bad_words,
            top_logprobs=request.top_logprobs,
            seen=self._seen(live),
            coupled=sampling.reproducible,
            generated_from=len(request.prompt_tokens),
            output=live.restored_output,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _seen(self, live: LiveRequest) -> bytes:
        """What a repetition penalty must know of the prompt tokens that a restore brings."""
        if not live.planned_tokens or live.request.sampling.repetition_penalty == 1.0:
            return b""
        restored = live.request.prompt_tokens[: live.planned_tokens]
        return seen_bits(restored, self._admission.limits.vocab_size)

    # Rounds.

    def _plan_round(self, decoding: list[LiveRequest]) -> tuple[RoundPlan, tuple[LiveRequest, ...]]:
        if len(decoding) > self.catalog.max_lanes:
            decoding.sort(key=self._last_round)
            del decoding[self.catalog.max_lanes :]
        ceilings = [self._ceiling(live) for live in decoding]
        copies = [_copies(live, ceiling) for live, ceiling in zip(decoding, ceilings, strict=True)]
        if self._copies_alone:
            ceilings = [len(copied) for copied, _ in copies]
        cohort = Cohort(
            tuple(
                CohortLane(live.uid, ceiling, sources)
                for live, ceiling, (_, sources) in zip(decoding, ceilings, copies, strict=True)
            )
        )
        masked = any(live.matcher is not None for live in decoding)
        candidates = self.catalog.candidates(len(decoding), masked=masked)
        shape = self._policy.choose(cohort, candidates)
        masks = self._masks.open(self._next_round)
        freed = self._freed()
        grants: list[PageGrant] = []
        lanes = []
        most_tokens = 0
        for live, asked, (copied, _) in zip(decoding, cohort.lanes, copies, strict=True):
            drafts = min(asked.ceiling, shape.draft_tokens)
            copied, sources = copied[:drafts], asked.sources[:drafts]
            bound = live.consumed_bound
            self._grant(live, bound + drafts + 1, grants)
            most_tokens = max(most_tokens, bound + shape.verify_width)
            row = masks.take(live, drafts + 1, filled=not shape.has_barrier)
            lanes.append(LanePlan(live.slot, live.epoch, drafts, copied, sources, mask_row=row))
            live.in_flight.append(Unanswered(drafts + 1, 1))
            self._last_round_of[live.uid] = self._next_round
        plan = RoundPlan(
            round_id=self._next_round,
            shape=shape,
            grants=tuple(grants),
            lanes=tuple(lanes),
            context_pages=min(pages_for(most_tokens), self._table_pages),
            mask_block=masks.name,
            mask_rows=masks.num_rows,
            saves=self._snapshots.take_saves(),
            freed=freed,
        )
        return plan, tuple(decoding)

    def _freed(self) -> FreedMemory | None:
        """Taken before the plan gives anything away; what its own lanes make free is told later,
        for its restores may still read it."""
        freed = self._admission.pool.freed
        return None if freed is None else freed.take()

    def _ceiling(self, live: LiveRequest) -> int:
        """Most drafts that can be of use and that stay inside the request's worst case (contract:
        C5, M1). What others hold has no say in it, so a text does not depend on them.

        One token fewer than the budget, since the target's own sample is emitted too. A lane that
        may have passed its worst case has ended by then, or has room for its pending token.
        """
        room = live.limit_pages * PAGE_TOKENS - 1 - live.consumed_bound
        return max(0, min(self.catalog.max_width - 1, live.budget_bound - 1, room))

    def _grant(self, live: LiveRequest, end: int, grants: list[PageGrant]) -> None:
        """Cover positions below `end` with pages of the request's reservation."""
        if end <= live.granted_pages * PAGE_TOKENS:
            return
        pages = min(pages_for(end), live.reserved_pages)
        missing = pages - live.granted_pages
        if missing > 0:
            page_ids = self._admission.pool.grant(live.uid, missing)
            grants.append(PageGrant(live.slot, live.granted_pages, page_ids))
            live.granted_pages = pages


def _copies(live: LiveRequest, ceiling: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that the request's round copies, at most `ceiling`, and their sources by depth."""
    copy = None if live.copies is None else live.copies.propose(ceiling)
    return ((), ()) if copy is None else (copy.tokens, (copy.source,) * len(copy.tokens))


def _within_message(prompts: list[LiveRequest], vocab_bytes: int) -> tuple[LiveRequest, ...]:
    """Those whose hand-overs fit one plan, the first one always; the others wait a turn."""
    chosen: list[LiveRequest] = []
    rules = shared = 0
    for live in prompts:
        added = 0 if live.started else _rule_bytes(live.request)
        if not live.started and live.planned_tokens:
            added += vocab_bytes * (live.request.sampling.repetition_penalty != 1.0)
        pages = 0 if live.started else live.granted_pages + len(live.restored_output) // 4
        fits = not added or not rules or rules + added <= PLAN_RULE_BYTES
        if fits and (not pages or shared + pages <= MAX_SHARED_PAGES):
            rules, shared = rules + added, shared + pages
            chosen.append(live)
    return tuple(chosen)


def _rule_bytes(request: GenerationRequest) -> int:
    sampling = request.sampling
    enders = (len(request.stop_token_ids) + MAX_EOS_IDS) * bool(sampling.min_tokens)
    words = sum(map(len, sampling.bad_words))
    return RULE_BYTES * (len(sampling.logit_bias) + enders) + WORD_TOKEN_BYTES * words

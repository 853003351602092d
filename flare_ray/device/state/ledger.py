"""What a rank's host knows about its slots, and the check of every plan against it.

The ledger mirrors slot hand-overs, grants and completed records; it never reads the device. A plan
that breaks an invariant is our own bug in another room: it is refused before anything changed
(contract: T4, M1). A stale epoch is no bug: the lane is left to the device, which ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_IDS,
    MAX_LOGIT_RULES,
    MAX_TOP_LOGPROBS,
    LanePlan,
    PageGrant,
    PrefillLane,
    RoundPlan,
    SlotInit,
)
from flare_ray.contracts.record import Field, Status
from flare_ray.contracts.shapes import PAGE_TOKENS, PROMPT_KINDS, GraphKind, GraphShape
from flare_ray.contracts.tiers import TierMove, TierOrder
from flare_ray.device.state.layout import pages_for
from flare_ray.device.state.snapshot_ledger import SnapshotLedger
from flare_ray.errors import ContractViolation

ACTIVE = Status.ACTIVE.value
ENDING = (Status.EOS | Status.LENGTH | Status.NONFINITE | Status.NO_TOKEN).value
NEVER = -1


@dataclass(slots=True)
class SlotView:
    """Host's view of one slot; counters are those of the last completed record.

    Attributes:
        pages: page-table entries granted from the start on, without a hole.
        published: tokens that the slot's publication row stands for; 0 = nothing published.
        speculation: family of the slot's first program; None before it.
        filling: the prompt is not consumed yet.
    """

    epoch: int = NEVER
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalised: bool = False
    num_rules: int = 0
    num_bad_words: int = 0
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    coupled: bool = False
    pages: int = 0
    consumed: int = 0
    published: int = 0
    budget: int = 0
    filling: bool = True
    ended: bool = True
    speculation: bool | None = None


class SlotLedger:
    """Slots of one rank as the host knows them.

    Args:
        manifest: what was prepared.
        table_columns: page-table entries of a slot.
    """

    def __init__(self, manifest: PreparedManifest, table_columns: int) -> None:
        self._manifest = manifest
        self._columns = table_columns
        self._slots = [SlotView() for _ in range(manifest.slots)]
        self._last_round = NEVER
        self.snapshots = SnapshotLedger(manifest)

    def view(self, slot: int) -> SlotView:
        """The host's view of `slot`, not a copy."""
        return self._slots[slot]

    def check(self, plan: RoundPlan, mask_rows: int | None) -> None:
        """Refuse a plan that this engine cannot execute as written.

        Args:
            mask_rows: rows of the mask block handed over with the plan, None without one.
        Raises:
            ContractViolation: what was wrong, with round, slot, got and expected.
        """
        problem = next(self._problems(plan, mask_rows), None)
        if problem is not None:
            raise ContractViolation(f"round {plan.round_id}: {problem}")

    def apply(self, plan: RoundPlan) -> None:
        """Note a checked plan's saves, hand-overs, restores and grants."""
        self._last_round = plan.round_id
        self.snapshots.apply_saves(plan.saves, self._slots)
        for init in plan.inits:
            self._slots[init.slot] = _fresh(init)
        for restore in plan.restores:
            self._slots[restore.slot].consumed = restore.consumed
        for grant in plan.grants:
            view = self._slots[grant.slot]
            view.pages = max(view.pages, grant.first_index + len(grant.page_ids))
        for lane in lanes_of(plan):
            view = self._slots[lane.slot]
            if view.epoch == lane.epoch and view.speculation is None:
                view.speculation = plan.shape.speculation

    def begin_order(self, order: TierOrder) -> None:
        """Check a move of a snapshot, and note its saves and what it overwrites.

        Raises:
            ContractViolation: it cannot be right; nothing was changed.
        """
        self.snapshots.check_order(order, self._slots)
        self.snapshots.apply_saves(order.saves, self._slots)
        if order.move is TierMove.LOAD:
            self.snapshots.begin_load(order)

    def complete(self, plan: RoundPlan, rows: Sequence[Sequence[int]]) -> None:
        """Note what the program did.

        Args:
            rows: record fields of each lane, in plan order.
        """
        for lane, row in zip(lanes_of(plan), rows, strict=True):
            view = self._slots[lane.slot]
            if view.epoch != lane.epoch or not row[Field.STATUS] & ACTIVE:
                continue
            view.published = _published(lane, view, row[Field.CONSUMED])
            view.consumed = row[Field.CONSUMED]
            view.budget = row[Field.BUDGET_LEFT]
            view.ended = bool(row[Field.STATUS] & ENDING)
            view.filling = isinstance(lane, PrefillLane) and not lane.final
        self.snapshots.complete(plan.captures, self._slots)

    def context_pages(self, plan: RoundPlan) -> int:
        """Page-table columns that hold every row the plan's live lanes may compute, one at least.

        A round of W rows at N consumed tokens computes positions up to N + W - 1 whatever budget
        and ceiling allow, and a drafter of depth D up to N + D - 2 besides.
        """
        rows = max(plan.shape.verify_width, plan.shape.draft_tokens)
        ends = [lane.start + len(lane.tokens) for lane in plan.prefill]
        ends += [
            self._slots[lane.slot].consumed + rows
            for lane in plan.lanes
            if self._slots[lane.slot].epoch == lane.epoch
        ]
        return min(pages_for(max([*ends, 1])), self._columns)

    def _problems(self, plan: RoundPlan, mask_rows: int | None) -> Iterator[str]:
        if plan.round_id <= self._last_round:
            yield f"ids must rise, the last one was {self._last_round}"
        yield from self._frame_problems(plan, mask_rows)
        yield from self.snapshots.problems(plan, self._slots)
        # slots as they will stand once the plan's hand-overs and grants are applied
        ahead: dict[int, SlotView] = {}
        for init in plan.inits:
            yield from self._init_problems(init)
            ahead[init.slot] = _fresh(init)
        restored = {restore.slot: restore.consumed for restore in plan.restores}
        for init in plan.inits:
            yield from _history_problems(init, restored.get(init.slot, 0))
        for restore in plan.restores:
            ahead[restore.slot].consumed = restore.consumed
        for grant in plan.grants:
            yield from self._grant_problems(grant, ahead)
        limit = min(plan.context_pages or self._columns, self._columns)
        for lane in lanes_of(plan):
            if not self._is_slot(lane.slot):
                yield f"slot {lane.slot} does not exist, {len(self._slots)} slots were prepared"
                continue
            view = ahead.get(lane.slot, self._slots[lane.slot])
            if isinstance(lane, LanePlan):
                yield from self._lane_problems(lane, view, plan.shape, limit)
            else:
                yield from self._chunk_problems(lane, view, plan.shape, limit)
            yield from _mask_problems(lane, mask_rows)
        if plan.shape.masked != any(lane.mask_row >= 0 for lane in plan.lanes):
            yield f"constrained lanes belong into masked rounds and no other, got {plan.shape}"

    def _is_slot(self, slot: int) -> bool:
        return 0 <= slot < len(self._slots)

    def _frame_problems(self, plan: RoundPlan, mask_rows: int | None) -> Iterator[str]:
        is_prefill = plan.shape.kind in PROMPT_KINDS
        lanes = lanes_of(plan)
        if plan.lanes if is_prefill else plan.prefill:
            yield f"a {plan.shape.kind} program got lanes of the other kind"
        if not 1 <= len(lanes) <= plan.shape.batch_capacity:
            yield f"{len(lanes)} lanes, the shape holds 1..{plan.shape.batch_capacity}"
        if len({(lane.slot, lane.epoch) for lane in lanes}) != len(lanes):
            yield "a request has two lanes in one round"
        if mask_rows is not None and mask_rows != plan.mask_rows:
            yield f"{mask_rows} mask rows came with the plan, it names {plan.mask_rows}"

    def _init_problems(self, init: SlotInit) -> Iterator[str]:
        name = f"slot {init.slot}"
        vocabulary = self._manifest.vocab_size
        if not self._is_slot(init.slot):
            yield f"{name} does not exist, {len(self._slots)} slots were prepared"
            return
        if init.epoch <= self._slots[init.slot].epoch:
            yield f"{name}: epoch {init.epoch} follows {self._slots[init.slot].epoch}; raise it"
        if init.budget < 1:
            yield f"{name}: budget {init.budget}, at least 1"
        if len(init.eos_ids) > MAX_EOS_IDS:
            yield f"{name}: {len(init.eos_ids)} EOS ids, the device holds {MAX_EOS_IDS}"
        if not all(0 <= token < vocabulary for token in init.eos_ids):
            yield f"{name}: EOS ids {init.eos_ids} outside the vocabulary of {vocabulary}"
        if not (init.temperature > 0 and 0 <= init.top_k <= vocabulary):
            yield f"{name}: temperature {init.temperature}, top_k {init.top_k}"
        if not (0 < init.top_p <= 1 and 0 <= init.min_p < 1):
            yield f"{name}: top_p {init.top_p}, min_p {init.min_p}"
        yield from _logit_problems(init, vocabulary)

    def _grant_problems(self, grant: PageGrant, ahead: dict[int, SlotView]) -> Iterator[str]:
        name = f"grant to slot {grant.slot}"
        if not self._is_slot(grant.slot):
            yield f"{name}: no such slot, {len(self._slots)} were prepared"
            return
        view = ahead.setdefault(grant.slot, replace(self._slots[grant.slot]))
        end = grant.first_index + len(grant.page_ids)
        if not 0 <= grant.first_index <= view.pages:
            yield f"{name}: entry {grant.first_index} leaves a hole after {view.pages} pages"
        if end > self._columns:
            yield f"{name}: entry {end - 1}, the table holds {self._columns}"
        if not all(0 < page < self._manifest.num_pages for page in grant.page_ids):
            yield f"{name}: pages {grant.page_ids} outside 1..{self._manifest.num_pages - 1}"
        view.pages = max(view.pages, end)

    def _lane_problems(
        self, lane: LanePlan, view: SlotView, shape: GraphShape, limit: int
    ) -> Iterator[str]:
        name = f"lane of slot {lane.slot}"
        if not 0 <= lane.ceiling <= shape.draft_tokens:
            yield f"{name}: ceiling {lane.ceiling}, the shape drafts 0..{shape.draft_tokens}"
        yield from self._copy_problems(lane, shape)
        if view.epoch != lane.epoch or view.ended:
            return
        if view.filling:
            yield f"{name}: a round before its prompt is consumed ({view.consumed} so far)"
        yield from _family_problems(name, view, shape)
        offered = max(min(lane.ceiling, shape.verify_width - 1, view.budget - 1), 0)
        yield from _page_problems(name, view, view.consumed + offered + 1, limit)

    def _copy_problems(self, lane: LanePlan, shape: GraphShape) -> Iterator[str]:
        if not lane.copy_tokens and not lane.copy_sources:
            return
        name = f"lane of slot {lane.slot}"
        if not self._manifest.copy_inputs:
            yield f"{name}: copy tokens, but no prepared graph takes them (contract: H2)"
        if len(lane.copy_tokens) > shape.draft_tokens:
            yield f"{name}: {len(lane.copy_tokens)} copy tokens for {shape.draft_tokens} drafts"
        if len(lane.copy_sources) != len(lane.copy_tokens):
            yield f"{name}: {len(lane.copy_sources)} sources for {len(lane.copy_tokens)} copies"
        if not all(-1 <= token < self._manifest.vocab_size for token in lane.copy_tokens):
            yield f"{name}: copy tokens {lane.copy_tokens} outside the vocabulary"

    def _chunk_problems(
        self, lane: PrefillLane, view: SlotView, shape: GraphShape, limit: int
    ) -> Iterator[str]:
        name = f"chunk of slot {lane.slot}"
        vocabulary = self._manifest.vocab_size
        if shape.kind is GraphKind.RESUME:
            if lane.tokens or not lane.final or not lane.start:
                yield f"{name}: a resume consumes nothing and goes on from a restored prefix"
        elif not 1 <= len(lane.tokens) <= shape.token_capacity:
            yield f"{name}: {len(lane.tokens)} tokens, the shape holds 1..{shape.token_capacity}"
        if lane.tokens and not (min(lane.tokens) >= 0 and max(lane.tokens) < vocabulary):
            yield f"{name}: tokens outside the vocabulary of {vocabulary}"
        if not -1 <= lane.next_token < vocabulary or (lane.next_token >= 0 and lane.final):
            yield f"{name}: next token {lane.next_token} with final={lane.final}"
        if lane.pending >= vocabulary or (lane.pending >= 0 and not lane.final):
            yield f"{name}: pending {lane.pending} with final={lane.final}"
        if lane.mask_row >= 0 and not lane.final:
            yield f"{name}: a mask without a first token to sample"
        if view.epoch != lane.epoch or view.ended:
            return
        if not view.filling or view.consumed != lane.start:
            state = "filling" if view.filling else "prompt consumed"
            yield f"{name}: starts at {lane.start}, the slot is at {view.consumed} ({state})"
        end = lane.start + len(lane.tokens)
        if end > self._manifest.context_tokens:
            yield f"{name}: ends at {end}, the context holds {self._manifest.context_tokens}"
        yield from _family_problems(name, view, shape)
        yield from _page_problems(name, view, end, limit)


def may_publish(plan: RoundPlan, views: Sequence[SlotView]) -> bool:
    """Whether some lane may end a row at a page boundary.

    Args:
        views: of the plan's lanes, in order.
    """
    for lane, view in zip(lanes_of(plan), views, strict=True):
        if isinstance(lane, PrefillLane):
            if (lane.start + len(lane.tokens)) % PAGE_TOKENS == 0:
                return True
        elif view.consumed % PAGE_TOKENS + plan.shape.verify_width >= PAGE_TOKENS:
            return True
    return False


def _published(lane: LanePlan | PrefillLane, view: SlotView, consumed: int) -> int:
    """Tokens of the publication row after a lane went from the view's count to `consumed`."""
    last = consumed // PAGE_TOKENS * PAGE_TOKENS
    crossed = last > view.consumed
    if isinstance(lane, PrefillLane):
        crossed &= last == consumed
    return last if crossed else view.published


def lanes_of(plan: RoundPlan) -> tuple[LanePlan | PrefillLane, ...]:
    """The plan's lanes in record order."""
    lanes: list[LanePlan | PrefillLane] = [*plan.lanes, *plan.prefill]
    return tuple(lanes)


def _fresh(init: SlotInit) -> SlotView:
    return SlotView(
        epoch=init.epoch,
        top_k=init.top_k,
        top_p=init.top_p,
        min_p=init.min_p,
        penalised=init.penalised,
        num_rules=len(init.rules),
        num_bad_words=len(init.bad_words),
        top_logprobs=init.top_logprobs,
        prompt_logprobs=init.prompt_logprobs,
        coupled=init.coupled,
        budget=init.budget,
        ended=False,
    )


def _history_problems(init: SlotInit, restored: int) -> Iterator[str]:
    """No program consumes what a restore brings, so the hand-over must tell of it."""
    name = f"slot {init.slot}"
    if restored and init.repetition != 1.0 and not init.seen:
        yield f"{name}: restored under a repetition penalty without `seen`"
    reads = init.penalised or bool(init.bad_words)
    expected = max(restored - init.generated_from, 0) if reads else 0
    if len(init.output) != 4 * expected:
        yield f"{name}: {len(init.output)} bytes of restored output, {expected} tokens are restored"


def _logit_problems(init: SlotInit, vocabulary: int) -> Iterator[str]:
    name = f"slot {init.slot}"
    if not init.repetition > 0:
        yield f"{name}: repetition {init.repetition}"
    if len(init.rules) > MAX_LOGIT_RULES:
        yield f"{name}: {len(init.rules)} logit rules, the device holds {MAX_LOGIT_RULES}"
    if not all(0 <= rule.token < vocabulary and rule.addend < math.inf for rule in init.rules):
        yield f"{name}: a logit rule's token or addend is out of range"
    for asked in (init.top_logprobs, init.prompt_logprobs):
        if not -1 <= asked <= MAX_TOP_LOGPROBS:
            yield f"{name}: {asked} top log-probabilities, at most {MAX_TOP_LOGPROBS}"
    if len(init.bad_words) > MAX_BAD_WORDS:
        yield f"{name}: {len(init.bad_words)} bad words, the device holds {MAX_BAD_WORDS}"
    for word in init.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            yield f"{name}: a bad word of {len(word)} tokens, 1..{MAX_BAD_WORD_TOKENS}"
        if not all(0 <= token < vocabulary for token in word):
            yield f"{name}: bad word {word} outside the vocabulary of {vocabulary}"


def _family_problems(name: str, view: SlotView, shape: GraphShape) -> Iterator[str]:
    """A slot whose drafter history has a hole must never draft, so a request keeps its family."""
    if view.speculation is not None and view.speculation != shape.speculation:
        families = {True: "speculative", False: "ordinary"}
        yield (
            f"{name}: a program of the {families[shape.speculation]} family, the request began "
            f"in the {families[view.speculation]} one"
        )


def _page_problems(name: str, view: SlotView, tokens: int, limit: int) -> Iterator[str]:
    needed = pages_for(tokens)
    if needed > view.pages:
        yield f"{name}: touches {tokens} positions = {needed} pages, {view.pages} were granted"
    if needed > limit:
        yield f"{name}: touches {needed} pages, the plan's context_pages is {limit}"


def _mask_problems(lane: LanePlan | PrefillLane, mask_rows: int | None) -> Iterator[str]:
    if lane.mask_row < 0:
        return
    rows = lane.ceiling + 1 if isinstance(lane, LanePlan) else 1
    if mask_rows is None or lane.mask_row + rows > mask_rows:
        yield (
            f"lane of slot {lane.slot}: mask rows {lane.mask_row}.."
            f"{lane.mask_row + rows - 1} of {mask_rows or 0}"
        )

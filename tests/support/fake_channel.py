"""A deterministic engine in memory: plays token scripts under the law of rounds, and checks plans.

`FakeChannel` implements `RankChannel`. It executes a plan when it is submitted, as an ordered
stream would, and hands the result out when its latency has passed. It holds the plan to what a
device relies on and no device could report: pages owned and granted before they are touched,
nothing reused under a queued round, shapes prepared, messages small. A breach raises
`PlanBreach`.

Time is real, or virtual with a `VirtualClock`: then `receive` moves the clock instead of sleeping.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import (
    LanePlan,
    PageGrant,
    PrefillLane,
    RoundPlan,
    SlotInit,
    SlotRestore,
    SnapshotSave,
)
from flare_ray.contracts.record import Flag, LaneRecord, Status
from flare_ray.contracts.shapes import PAGE_TOKENS, PROMPT_KINDS, GraphKind
from flare_ray.contracts.tiers import TierOrder, TierOutcome
from flare_ray.controller.ports import RoundResult
from flare_ray.errors import RankFailure
from tests.support.fake_manifest import CollectingOutput as CollectingOutput
from tests.support.fake_manifest import make_manifest as make_manifest
from tests.support.fake_scripts import AcceptTable as AcceptTable
from tests.support.fake_scripts import Script as Script
from tests.support.fake_scripts import accepts_up_to as accepts_up_to
from tests.support.fake_scripts import draft_passes as draft_passes
from tests.support.fake_scripts import hashed_accepts as hashed_accepts
from tests.support.fake_scripts import hashed_script as hashed_script
from tests.support.fake_scripts import listed_script as listed_script
from tests.support.fake_tiers import FakeTiers

MAX_PLAN_BYTES = 64 * 1024
NANOSECONDS = 1_000_000_000


class PlanBreach(AssertionError):
    """A plan asked for something that would corrupt a device."""


def packed_scores(tokens: Sequence[int], top: int) -> bytes:
    """Scores as a rank sends them: token t has log-probability -t / 8, alternatives t + 1, ..."""
    words = []
    for token in tokens if top >= 0 else ():
        ids = [token + place for place in range(1, top + 1)]
        words.append(struct.pack(f"<f{top}i{top}f", -token / 8, *ids, *(-i / 8 for i in ids)))
    return b"".join(words)


class VirtualClock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * NANOSECONDS)


@dataclass
class _Slot:
    """What a device keeps per slot."""

    init: SlotInit | None = None
    prompt: list[int] = field(default_factory=list)
    consumed: int = 0
    generated: int = 0
    pending: int = -1
    finished: bool = False
    pages: dict[int, int] = field(default_factory=dict)
    shared_pages: int = 0
    history: list[int] = field(default_factory=list)
    published: tuple[int, ...] = ()
    generated_before: int = 0
    counted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Outcome:
    """What one lane did."""

    tokens: tuple[int, ...]
    offered: int = 0
    accepted: int = 0
    flags: Flag = Flag.NONE
    status: Status = Status.IDLE


class FakeChannel:
    """One engine's ranks.

    Attributes:
        plans: every plan submitted, in order.
        rows_by_request: uid -> tokens the device emitted for it, dead lanes excluded.
        dead_lanes: lanes that executed no transition.
        restores / resumes: slots that went on from a snapshot / with a pending token.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        script: Script,
        accepts: AcceptTable,
        *,
        latency_s: Callable[[RoundPlan], float] = lambda plan: 0.0,
        queue_depth: int = 2,
        clock: VirtualClock | None = None,
    ) -> None:
        self.manifest = manifest
        self.script = script
        self.accepts = accepts
        self.latency_s = latency_s
        self.queue_depth = queue_depth
        self.clock = clock
        self.plans: list[RoundPlan] = []
        self.rows_by_request: dict[int, list[int]] = {}
        self.dead_lanes = 0
        self.closed = False
        self._slots = [_Slot() for _ in range(manifest.slots)]
        self._owner: dict[int, tuple[int, int]] = {}
        self._content: dict[int, dict[int, int]] = {}
        self._rows: dict[int, tuple[int, ...]] = {}
        self.restores = 0
        self.resumes = 0
        self._queued: deque[tuple[RoundPlan, RoundResult, int]] = deque()
        self.tiers = FakeTiers(self._rows, self._content, self._apply_save)
        self._condition = threading.Condition()
        self._woken = False
        self._failure: RankFailure | None = None
        self._fail_at: dict[int, tuple[int, str]] = {}
        self._nonfinite: set[tuple[int, int]] = set()

    # The protocol.

    def submit(self, plan: RoundPlan) -> None:
        with self._condition:
            self._raise_failure()
            self._check_plan(plan)
            for save in plan.saves:
                self._apply_save(save)
            self._forget_freed(plan)
            for init in plan.inits:
                self._apply_init(init)
            self._apply_restores(plan)
            # Before the grants, as on a device: a page that is copied may be given away already.
            copies = {
                restore.target_page: dict(self._content.get(restore.source_page, {}))
                for restore in plan.restores
            }
            for grant in plan.grants:
                self._apply_grant(grant)
            self._content.update(copies)
            for restore in plan.restores:
                self._check_restored(restore)
            lanes = [self._prefill(plan, lane, plan.context_pages) for lane in plan.prefill]
            lanes += [self._round(plan, lane) for lane in plan.lanes]
            for capture in plan.captures:
                self._apply_save(capture)
            latency_ns = round(self.latency_s(plan) * NANOSECONDS)
            start_ns = max(self._now(), self._queued[-1][2] if self._queued else 0)
            result = RoundResult(plan.round_id, tuple(lanes), latency_ns)
            self.plans.append(plan)
            self._queued.append((plan, result, start_ns + latency_ns))

    def order(self, order: TierOrder) -> None:
        with self._condition:
            self._raise_failure()
            self.tiers.order(order)

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        with self._condition:
            return self.tiers.take_outcomes()

    def receive(self, timeout_s: float) -> RoundResult | None:
        deadline_ns = self._now() + round(timeout_s * NANOSECONDS)
        with self._condition:
            while True:
                self._raise_failure()
                ready_ns = self._queued[0][2] if self._queued else None
                if ready_ns is not None and ready_ns <= self._now():
                    return self._take()
                if self._woken or self.tiers.has_outcomes or self._now() >= deadline_ns:
                    self._woken = False
                    return None
                until_ns = deadline_ns if ready_ns is None else min(deadline_ns, ready_ns)
                if self.clock is not None:
                    self.clock.now_ns = until_ns
                else:
                    self._condition.wait((until_ns - self._now()) / NANOSECONDS)

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        self.closed = True

    # Faults.

    def fail_at(self, round_id: int, *, rank: int, cause: str) -> None:
        """The answer to this round is the death of a rank."""
        self._fail_at[round_id] = (rank, cause)

    def kill_rank(self, rank: int, cause: str = "connection closed") -> None:
        """A rank dies now; any thread."""
        with self._condition:
            round_id = self.plans[-1].round_id if self.plans else -1
            self._failure = _rank_failure(rank, round_id, cause)
            self._condition.notify()

    def poison(self, uid: int, generated: int) -> None:
        """The round of request `uid` that starts with `generated` tokens meets NaN logits."""
        self._nonfinite.add((uid, generated))

    # The device.

    def _apply_init(self, init: SlotInit) -> None:
        slot = self._slots[init.slot]
        _require(slot.init is None or init.epoch > slot.init.epoch, "an epoch was used twice")
        _require(init.budget >= 1 and init.temperature > 0, f"slot {init.slot}: bad init {init}")
        epoch = slot.init.epoch if slot.init is not None else 0
        reused_early = self._is_queued(init.slot, epoch)
        _require(not reused_early, f"slot {init.slot} reused under a queued round")
        self._slots[init.slot] = _Slot(init=init)
        self.rows_by_request.setdefault(init.uid, [])

    def _forget_freed(self, plan: RoundPlan) -> None:
        """What was freed is gone: a later read of it is noticed by its missing tokens."""
        if plan.freed is None:
            return
        for page in plan.freed.pages:
            owner = self._owner.get(page)
            _require(owner is None or not self._is_queued(*owner), f"page {page} freed too early")
            self._content[page] = {}
        for row in plan.freed.rows:
            self._rows.pop(row, None)
        for index in plan.freed.slots:
            slot = self._slots[index]
            epoch = slot.init.epoch if slot.init is not None else 0
            _require(not self._is_queued(index, epoch), f"slot {index} freed under a queued round")
            slot.history, slot.published = [], ()

    def _apply_save(self, save: SnapshotSave) -> None:
        _require(0 <= save.row < self.manifest.snapshot_rows, f"row {save.row} was not prepared")
        slot = self._slots[save.slot]
        _require(slot.init is not None and slot.init.epoch == save.epoch, f"{save}: other epoch")
        held = tuple(slot.history) if save.live else slot.published
        _require(len(held) == save.consumed, f"{save}: {len(held)} tokens are there")
        self._rows[save.row] = held

    def _apply_restores(self, plan: RoundPlan) -> None:
        """Slots as their snapshots left them; the pages they share are known by the row."""
        for restore in plan.restores:
            slot = self._slots[restore.slot]
            _require(slot.init is not None and slot.init.epoch == restore.epoch, "epoch")
            _require(any(init.slot == restore.slot for init in plan.inits), "not handed over")
            tokens = self._rows.get(restore.row, ())
            _require(len(tokens) == restore.consumed, f"{restore}: row holds {len(tokens)} tokens")
            first = slot.init.generated_from
            slot.history = list(tokens)
            slot.prompt = list(tokens[:first])
            output = slot.init.output
            slot.counted = [value for (value,) in struct.iter_unpack("<i", output)]
            reads = slot.init.penalised or bool(slot.init.bad_words)
            expected = list(tokens[first:]) if reads else []
            _require(slot.counted == expected, f"{restore}: output {slot.counted} is handed over")
            slot.consumed = restore.consumed
            slot.shared_pages = (restore.consumed - 1) // PAGE_TOKENS
            self.restores += 1

    def _check_restored(self, restore: SlotRestore) -> None:
        slot = self._slots[restore.slot]
        last = slot.shared_pages
        _require(slot.pages.get(last) == restore.target_page, f"{restore}: not its own page")
        for position, token in enumerate(slot.history):
            page = slot.pages[position // PAGE_TOKENS]
            there = self._content.get(page, {}).get(position % PAGE_TOKENS)
            _require(there == token, f"{restore}: page {page} holds {there} at {position}")

    def _consume(self, slot: _Slot, tokens: Sequence[int]) -> None:
        """Write committed tokens into the slot's own pages."""
        for token in tokens:
            position = len(slot.history)
            place = position // PAGE_TOKENS
            _require(place >= slot.shared_pages, f"position {position} lies in a shared page")
            self._content.setdefault(slot.pages[place], {})[position % PAGE_TOKENS] = token
            slot.history.append(token)
            if len(slot.history) % PAGE_TOKENS == 0:
                slot.published = tuple(slot.history)

    def _apply_grant(self, grant: PageGrant) -> None:
        slot = self._slots[grant.slot]
        _require(slot.init is not None, f"slot {grant.slot}: pages granted before its init")
        assert slot.init is not None
        for place, page in enumerate(grant.page_ids, start=grant.first_index):
            _require(0 < page < self.manifest.num_pages, f"page {page} is no page of the pool")
            _require(place not in slot.pages, f"slot {grant.slot}: entry {place} granted twice")
            _require(page not in slot.pages.values(), f"page {page} granted twice to one slot")
            if place < slot.shared_pages:
                slot.pages[place] = page
                continue
            owner = self._owner.get(page)
            reused_early = owner is not None and self._is_queued(*owner)
            _require(not reused_early, f"page {page} reused under a queued round")
            slot.pages[place] = page
            self._content[page] = {}
            self._owner[page] = (grant.slot, slot.init.epoch)

    def _prefill(self, plan: RoundPlan, lane: PrefillLane, context_pages: int) -> LaneRecord:
        slot = self._slots[lane.slot]
        if slot.init is None or slot.init.epoch != lane.epoch:
            return self._dead(plan, lane.slot)
        if plan.shape.kind is GraphKind.RESUME:
            _require(not lane.tokens and lane.final and lane.start > 0, f"no resume: {lane}")
        else:
            _require(0 < len(lane.tokens) <= plan.shape.token_capacity, "prefill chunk too long")
        _require(lane.start == slot.consumed, f"chunk starts at {lane.start}, not {slot.consumed}")
        self._touch(lane.slot, lane.start + len(lane.tokens), context_pages)
        prompt_left = max(slot.init.generated_from - slot.consumed, 0)
        slot.prompt.extend(lane.tokens[:prompt_left])
        slot.counted.extend(lane.tokens[prompt_left:])
        slot.consumed += len(lane.tokens)
        self._consume(slot, lane.tokens)
        tokens: tuple[int, ...] = ()
        flags = Flag.PREFILL
        if lane.final and lane.pending >= 0:
            self._go_on(slot, lane.pending)
        elif lane.final:
            tokens = self._commit(slot, 1)
            flags |= Flag.FIRST_TOKEN
        return self._record(plan, slot, _Outcome(tokens, flags=flags))

    def _go_on(self, slot: _Slot, pending: int) -> None:
        """A request that was preempted: its history and pending token must be its own text."""
        assert slot.init is not None
        text = [*slot.history[slot.init.generated_from :], pending]
        expected = [self.script(tuple(slot.prompt), index) for index in range(len(text))]
        _require(text == expected, f"a resumed request goes on from {text}")
        reads = slot.init.penalised or bool(slot.init.bad_words)
        _require(not reads or slot.counted == text[:-1], f"counted are {slot.counted} of {text}")
        slot.generated_before = len(text)
        slot.pending = pending
        self.resumes += 1

    def _round(self, plan: RoundPlan, lane: LanePlan) -> LaneRecord:
        slot = self._slots[lane.slot]
        if slot.init is None or slot.init.epoch != lane.epoch or slot.finished:
            return self._dead(plan, lane.slot)
        _require(slot.pending >= 0, f"slot {lane.slot}: a round before the prompt's end")
        _require(0 <= lane.ceiling <= plan.shape.draft_tokens, f"ceiling {lane.ceiling}")
        # As a device: never more drafts than the budget leaves, whatever the host knew.
        offered = min(lane.ceiling, slot.init.budget - slot.generated - 1)
        self._touch(lane.slot, slot.consumed + offered + 1, plan.context_pages)
        if (slot.init.uid, slot.generated) in self._nonfinite:
            slot.finished = True
            return self._record(plan, slot, _Outcome((), offered, status=Status.NONFINITE))
        prompt = tuple(slot.prompt)
        accepted = 0
        before = slot.generated_before + slot.generated
        passes = draft_passes(self.script, self.accepts, prompt, before)
        while accepted < offered and passes(accepted, lane.copy_tokens):
            accepted += 1
        generated, pending = slot.generated, slot.pending
        tokens = self._commit(slot, accepted + 1)
        self._consume(slot, (pending, *tokens)[: slot.generated - generated])
        slot.consumed += slot.generated - generated
        return self._record(plan, slot, _Outcome(tokens, offered, accepted))

    def _commit(self, slot: _Slot, count: int) -> tuple[int, ...]:
        """Emit up to `count` tokens, clipped at EOS and budget."""
        assert slot.init is not None
        tokens: list[int] = []
        while len(tokens) < count and not slot.finished:
            place = slot.generated_before + slot.generated
            token = self.script(tuple(slot.prompt), place)
            tokens.append(token)
            slot.generated += 1
            slot.pending = token
            slot.finished = token in slot.init.eos_ids or slot.generated >= slot.init.budget
        self.rows_by_request[slot.init.uid] += tokens
        return tuple(tokens)

    def _touch(self, index: int, end: int, context_pages: int) -> None:
        """Positions below `end` are read or written by this slot."""
        slot = self._slots[index]
        assert slot.init is not None
        pages = -(-end // PAGE_TOKENS)
        _require(pages <= context_pages, f"slot {index}: {pages} pages, bound {context_pages}")
        for place in range(pages):
            page = slot.pages.get(place)
            if place < slot.shared_pages:
                _require(page is not None, f"slot {index}: shared entry {place} was not granted")
                continue
            _require(page is not None, f"slot {index}: entry {place} touched before its grant")
            owner = self._owner.get(page) if page is not None else None
            _require(owner == (index, slot.init.epoch), f"page {page} belongs to {owner}")

    def _record(self, plan: RoundPlan, slot: _Slot, outcome: _Outcome) -> LaneRecord:
        assert slot.init is not None
        status = Status.ACTIVE | outcome.status
        if slot.finished and outcome.tokens:
            at_end = slot.pending in slot.init.eos_ids
            status |= Status.EOS if at_end else Status.LENGTH
        return LaneRecord(
            uid=slot.init.uid,
            epoch=slot.init.epoch,
            round_id=plan.round_id,
            status=int(status),
            consumed=slot.consumed,
            generated=slot.generated,
            budget_left=slot.init.budget - slot.generated,
            drafted=plan.shape.draft_tokens,
            offered=outcome.offered,
            accepted=outcome.accepted,
            emitted=len(outcome.tokens),
            copy_bits=0,
            draft_position=max(slot.consumed - 1, 0),
            width=plan.shape.verify_width,
            flags=int(outcome.flags),
            checksum=0,
            tokens=outcome.tokens,
            scores=packed_scores(outcome.tokens, slot.init.top_logprobs),
        )

    def _dead(self, plan: RoundPlan, index: int) -> LaneRecord:
        self.dead_lanes += 1
        init = self._slots[index].init
        values = [0] * 16
        values[0:4] = [init.uid if init else 0, init.epoch if init else 0, plan.round_id, 0]
        return msgspec.convert((*values, ()), LaneRecord)

    # Bookkeeping.

    def _check_plan(self, plan: RoundPlan) -> None:
        previous = self.plans[-1].round_id if self.plans else -1
        _require(plan.round_id == previous + 1 or not self.plans, f"round {plan.round_id}")
        _require(len(self._queued) < self.queue_depth, "too many rounds queued")
        _require(plan.shape in self.manifest.shapes, f"{plan.shape} was not prepared")
        lanes: tuple[LanePlan | PrefillLane, ...] = (*plan.lanes, *plan.prefill)
        _require(bool(lanes), "a plan without lanes")
        _require(not (plan.lanes and plan.prefill), "a plan that mixes rounds and prefill")
        is_prefill = plan.shape.kind in PROMPT_KINDS
        _require(is_prefill == bool(plan.prefill), f"lanes do not fit {plan.shape.kind}")
        _require(len(lanes) <= plan.shape.batch_capacity, "more lanes than the program has")
        _require(len({lane.slot for lane in lanes}) == len(lanes), "a slot in two lanes")
        size = len(msgspec.msgpack.encode(plan))
        _require(size <= MAX_PLAN_BYTES, f"plan of {size} bytes")

    def _is_queued(self, slot: int, epoch: int) -> bool:
        return any(
            (lane.slot, lane.epoch) == (slot, epoch)
            for plan, _, _ in self._queued
            for lane in (*plan.lanes, *plan.prefill)
        )

    def _take(self) -> RoundResult:
        plan, result, _ = self._queued.popleft()
        if plan.round_id in self._fail_at:
            rank, cause = self._fail_at[plan.round_id]
            self._failure = _rank_failure(rank, plan.round_id, cause)
            self._raise_failure()
        return result

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _now(self) -> int:
        return self.clock() if self.clock is not None else time.monotonic_ns()


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise PlanBreach(problem)


def _rank_failure(rank: int, round_id: int, cause: str) -> RankFailure:
    message = f"rank {rank} failed in round {round_id}: {cause}"
    return RankFailure(message, rank=rank, round_id=round_id)

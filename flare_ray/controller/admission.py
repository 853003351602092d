"""Who gets in: validation against the engine, the bounded queue, slots and page reservations
(contract: C1).

Order: lower `priority` first, fair shares among tenants of equals (`shares`), arrival order within
a tenant. The head of the queue waits until a slot
is free and the pool can promise the pages of its prompt, while every running request, itself
included, could still grow by GROWTH_PAGES; nobody overtakes it, so a long request is never starved
by short ones. A request that was accepted into the queue keeps its place, also when it is preempted
and comes back. Without preemption the pool must promise its worst case instead. The queue is
bounded in requests and in tokens; who finds it full is told when a place is expected to be free.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.drain import DrainRate
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.controller.paging.snapshots import Snapshots
from flare_ray.controller.shares import FairShares
from flare_ray.errors import ContractViolation, InvalidRequest, Overloaded

PREEMPTION_KINDS = ("snapshot", "recompute")
GROWTH_PAGES = 2
"""Pages, 128 tokens, that each running request can still grow by when another one is admitted. Less
would let a request in only to preempt it, or another, a page later; more leaves pages idle. Outputs
that are shorter are reserved in full, so they are never preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Numbers a request is held against.

    Attributes:
        context_tokens: longest prompt plus output.
        max_prompt_tokens: longest prompt.
        vocab_size: token ids lie below it.
        max_waiting: requests that may wait.
        max_waiting_tokens: tokens, prompts and budgets, of those that may wait; None = any number.
        slack_tokens: positions that a second queued round may touch beyond the last one that can
            be committed (contract: M1).
        preempts: pages are promised as requests grow; else all of them at admission.
        copies: rounds take copied drafts.
    """

    context_tokens: int
    max_prompt_tokens: int
    vocab_size: int
    max_waiting: int
    slack_tokens: int
    max_waiting_tokens: int | None = None
    preempts: bool = True
    copies: bool = True

    def worst_case_pages(self, request: GenerationRequest) -> int:
        """Pages the request can come to touch.

        The last generated token stays pending, so prompt + max_tokens - 1 positions are committed
        at most; beyond the context's own pages no lane is offered a draft.
        """
        tokens = len(request.prompt_tokens) + request.max_tokens - 1 + self.slack_tokens
        return min(pages_for(tokens), pages_for(self.context_tokens))

    def _check_prediction(self, prediction: tuple[int, ...]) -> None:
        if prediction and not self.copies:
            raise InvalidRequest(
                "prediction: this engine runs without drafts, so a predicted output is of no use; "
                "leave it out",
                param="prediction",
                code="unsupported_parameter",
            )
        if prediction and (min(prediction) < 0 or max(prediction) >= self.vocab_size):
            raise InvalidRequest(
                f"prediction: token ids must lie in 0..{self.vocab_size - 1}", param="prediction"
            )

    def first_pages(self, live: LiveRequest) -> int:
        """Pages promised to a request when it gets its slot."""
        if not self.preempts:
            return live.limit_pages
        return min(pages_for(live.prefill_length), live.limit_pages)

    def check(self, request: GenerationRequest, total_pages: int) -> None:
        """Refuse what this engine can never run.

        Raises:
            InvalidRequest: with the numbers that do not fit.
        """
        prompt = len(request.prompt_tokens)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if prompt > self.max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens, this engine takes at most "
                f"{self.max_prompt_tokens}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
            )
        if prompt + request.max_tokens > self.context_tokens:
            raise InvalidRequest(
                f"the prompt's {prompt} tokens and max_tokens {request.max_tokens} exceed the "
                f"context of {self.context_tokens} tokens; shorten one of them",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if min(request.prompt_tokens) < 0 or max(request.prompt_tokens) >= self.vocab_size:
            raise InvalidRequest(
                f"prompt token ids must lie in 0..{self.vocab_size - 1}", param="prompt"
            )
        self._check_prediction(request.prediction)
        if not 0.0 < request.weight < math.inf:
            raise InvalidRequest(
                f"weight must be a positive number, got {request.weight}", param="weight"
            )
        if b"" in request.stop:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        pages = self.worst_case_pages(request)
        if pages > total_pages:
            raise InvalidRequest(
                f"the request may need {pages} pages, the pool has {total_pages}; shorten it or "
                "raise page_pool_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )


def _tokens(live: LiveRequest) -> int:
    """Prompt and budget."""
    return len(live.request.prompt_tokens) + live.request.max_tokens


class SlotTable:
    """Free slots and the generation of each (contract: T6)."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = deque(range(slots))
        self._epochs = [0] * slots

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free slot, longest unused first, and its new epoch."""
        slot = self._free.popleft()
        self._epochs[slot] += 1
        return slot, self._epochs[slot]

    def is_current(self, slot: int, epoch: int) -> bool:
        """Whether the slot is held, by that generation."""
        return slot not in self._free and self._epochs[slot] == epoch

    def give_back(self, slot: int) -> None:
        """Make a slot free; only after every round that references it has been harvested."""
        if slot in self._free:
            raise ContractViolation(f"slot {slot} was given back twice")
        self._free.append(slot)


class Admission:
    """The queue in front of the slots, and the resources behind them.

    Attributes:
        waiting: the queue, next one first.
        running: holders of a slot that have not ended, in order of admission.
        holders: by slot, those and the ended and preempted ones whose rounds have not drained.
        preempted: requests preempted, by what their state became: "snapshot" or "recompute".
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        pool: PagePool,
        slots: int,
        snapshots: Snapshots,
        *,
        drain: DrainRate,
    ) -> None:
        self.limits = limits
        self.snapshots = snapshots
        self.pool = pool
        self.slots = SlotTable(slots)
        self._drain = drain
        self._shares = FairShares()
        self.waiting: list[LiveRequest] = []
        self.running: dict[int, LiveRequest] = {}
        self.holders: dict[int, LiveRequest] = {}
        self.preempted = dict.fromkeys(PREEMPTION_KINDS, 0)

    @property
    def short_pages(self) -> int:
        """Pages that running requests lack for their next rounds."""
        return sum(live.short_pages for live in self.running.values())

    @property
    def waiting_tokens(self) -> int:
        """Tokens, prompts and budgets, of those that wait; any thread."""
        return sum(map(_tokens, tuple(self.waiting)))

    def enqueue(self, live: LiveRequest) -> None:
        """Check a new request and queue it.

        Raises:
            InvalidRequest: this engine can never run it.
            Overloaded: the queue is full (and the request could not get a slot at once).
        """
        self.limits.check(live.request, self.pool.total_pages)
        live.limit_pages = self.limits.worst_case_pages(live.request)
        self._queue(live)
        requests, tokens = self._excess()
        if (requests <= 0 and tokens <= 0) or self._would_run_now(live):
            return
        self._leave(live)
        wait_s = self._drain.refuse(max(requests, 0), max(tokens, 0))
        limit = f"{self.limits.max_waiting} requests"
        if requests <= 0:
            limit = f"{self.limits.max_waiting_tokens} tokens"
        raise Overloaded(
            f"{len(self.waiting)} requests of {self.waiting_tokens} tokens are waiting, at most "
            f"{limit} may; retry in {wait_s:.3g} s",
            retry_after_s=wait_s,
        )

    def _excess(self) -> tuple[int, int]:
        """Requests and tokens in the queue beyond its bounds; 0 or less = none. A request alone in
        the queue is never too large for it."""
        tokens, most = 0, self.limits.max_waiting_tokens
        if most is not None and len(self.waiting) > 1:
            tokens = self.waiting_tokens - most
        return len(self.waiting) - self.limits.max_waiting, tokens

    def _would_run_now(self, live: LiveRequest) -> bool:
        """Whether everybody in the queue through `live` finds a slot and pages."""
        place = self.waiting.index(live)
        if place >= self.slots.free:
            return False
        ahead = self.waiting[: place + 1]
        needed = sum(map(self.limits.first_pages, ahead)) + self._growth(ahead)
        return not self.short_pages and needed <= self.pool.free_pages

    def admit(self) -> list[LiveRequest]:
        """Move requests from the head of the queue into slots while slots and pages last.

        None gets in while a running request lacks pages, nor while one's pages are on their way.
        One whose prefix comes from the host or from disk keeps its place, and others pass it.
        """
        admitted: list[LiveRequest] = []
        if not self.waiting or not self.slots.free or self.short_pages:
            return admitted
        self._shares.arrange(self.waiting, self.running.values())
        place = 0
        while place < len(self.waiting) and self.slots.free:
            live = self.waiting[place]
            if self.snapshots.is_restoring(live):
                place += 1
                continue
            if self.snapshots.is_in_the_making(live, self.running.values()):
                break
            if not self._reserve(live):
                break
            self._leave(live)
            self._shares.settle(live)
            self._drain.left(_tokens(live))
            live.slot, live.epoch = self.slots.take()
            live.phase = Phase.PREFILL
            self.running[live.uid] = live
            self.holders[live.slot] = live
            admitted.append(live)
        return admitted

    def _reserve(self, live: LiveRequest) -> bool:
        """Promise the first pages, less what a snapshot shares.

        A pinned snapshot must not be what the promise waits for, so the request goes without one
        before it goes without pages.
        """
        pages = self.limits.first_pages(live)
        spare = self._growth((live,))
        snapshot = self.snapshots.find(live)
        if snapshot is not None:
            shared = snapshot.shared_pages
            if self.pool.reserve(live.uid, pages - len(shared), shared, spare=spare):
                live.reserved_pages = pages
                self.snapshots.admitted(live, snapshot)
                return True
            self.snapshots.unpin(snapshot)
        if not self.pool.reserve(live.uid, pages, spare=spare):
            return False
        live.reserved_pages = pages
        self.snapshots.admitted(live, None)
        return True

    def _growth(self, entering: Iterable[LiveRequest]) -> int:
        """Pages by which those that run, and those who would, may still grow unhindered."""
        rooms = [live.limit_pages - live.reserved_pages for live in self.running.values()]
        rooms += [live.limit_pages - self.limits.first_pages(live) for live in entering]
        return sum(min(room, GROWTH_PAGES) for room in rooms)

    def preempt(self, live: LiveRequest) -> None:
        """Take a running request's slot and pages away; it returns to its place in the queue once
        the rounds that reference it have been harvested, with what they bring."""
        del self.running[live.uid]
        live.phase = Phase.PREEMPTED
        self.retire(live)

    @property
    def is_draining(self) -> bool:
        """Whether slots and pages come back once the submitted rounds are harvested."""
        return len(self.holders) > len(self.running)

    def end(self, live: LiveRequest) -> None:
        """Take a request out; its slot and pages return once no queued round references them."""
        if live.phase is Phase.WAITING:
            self._leave(live)
        else:
            self.running.pop(live.uid, None)
            self._shares.settle(live)
        live.phase = Phase.ENDED
        self.snapshots.release(live)
        self.retire(live)

    def retire(self, live: LiveRequest) -> None:
        """Return the resources of an ended or preempted request if its rounds have drained
        (contract: T7)."""
        if live.in_flight or live.slot < 0:
            return
        if live.phase is Phase.ENDED:
            self._give_back(live)
        elif live.phase is Phase.PREEMPTED:
            kept = self.snapshots.preempted(live, self.short_pages)
            self.preempted["snapshot" if kept else "recompute"] += 1
            self.snapshots.leave(live)
            self._shares.settle(live)
            self._give_back(live)
            live.set_back()
            self._queue(live)

    def _give_back(self, live: LiveRequest) -> None:
        self.pool.release(live.uid)
        del self.holders[live.slot]
        self.slots.give_back(live.slot)
        if self.pool.freed is not None:
            self.pool.freed.slots.add(live.slot)
        live.slot = -1

    def _queue(self, live: LiveRequest) -> None:
        if not self.waiting:
            self._drain.filled()
        self._shares.entered(live, self.running.values())
        bisect.insort(self.waiting, live, key=lambda other: other.queue_order)
        self._shares.arrange(self.waiting, self.running.values())

    def _leave(self, live: LiveRequest) -> None:
        self.waiting.remove(live)
        self._shares.left(live)

    def check_integrity(self) -> None:
        """Compare slots, epochs, reservations, pages and snapshots with the requests.

        Raises:
            ContractViolation: something is held by nobody, by two, or beyond its count.
        """
        self.snapshots.check_integrity(self.holders.values())
        problems = []
        if self.slots.free + len(self.holders) != self.slots.total:
            problems.append(f"{self.slots.free} free slots, {len(self.holders)} held")
        if set(self.pool.owners) != {live.uid for live in self.holders.values()}:
            problems.append(f"pages are reserved for {sorted(self.pool.owners)}")
        for slot, live in self.holders.items():
            name = f"request {live.uid} in slot {slot}"
            if live.slot != slot or not self.slots.is_current(slot, live.epoch):
                problems.append(f"{name}: it says slot {live.slot}, epoch {live.epoch}")
            if (live.phase in (Phase.PREFILL, Phase.DECODE)) != (live.uid in self.running):
                problems.append(f"{name}: phase {live.phase.name}")
            pages = (live.granted_pages, live.reserved_pages)
            if self.pool.count_of(live.uid) != pages:
                problems.append(f"{name}: pages {pages}, the pool says otherwise")
        if problems:
            raise ContractViolation("admission is damaged: " + "; ".join(problems))

"""When a prefix is kept, when a request starts from one, and what plans must carry for it
(contract: M4, M7).

Kept are the prompt's last page boundary and its end, a finished request's end, and page boundaries
at doubling distances while decoding.

A snapshot's life as the ranks see it:

    prompt    claim a row -> the chunk's plan captures its end state -> harvested: published
    decoding  harvested over a boundary -> claim, publish -> the next plan saves the row
    a hit     pinned at admission -> the first plan restores it -> unpinned
    below     a longer prefix in host memory or on disk is brought back first (`tiers.py`)

Decode snapshots are published before their row is written: every restore travels in the same plan
or a later one, and a plan's saves run first. The publication row still holds that boundary then: at
most two rounds were queued, of eight tokens each, and the next boundary is 64 tokens away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flare_ray.contracts.plan import MAX_SHARED_PAGES, SlotRestore, SnapshotSave
from flare_ray.contracts.record import FAULTS, LaneRecord, Status
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.live import LiveRequest
from flare_ray.controller.paging.chain import Key
from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.controller.paging.prefix import PrefixIndex, Snapshot
from flare_ray.controller.paging.tiers import Tiers
from flare_ray.errors import ContractViolation


@dataclass(frozen=True, slots=True)
class Capture:
    """A claimed row that a submitted chunk fills: index of the chunk's lane in its plan."""

    lane: int
    snapshot: Snapshot


class Snapshots:
    """Prefix snapshots of one engine. Used by the controller's thread.

    Args:
        tiers: copies below the device.
        inside_rounds: a row inside a round's accepted rows can be kept, not only its last.
        resumes: a whole prompt can be restored; else its last token is always consumed.
    Attributes:
        index: what is cached on the device.
        tiers: as given.
        queried_tokens / hit_tokens: prompt tokens of admitted requests, and those restored.
        restored_tokens / restored_bytes: of snapshots that requests started from, preempted ones
            included; bytes on one rank, here and below.
        saved_tokens / saved_bytes: of published snapshots.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pool: PagePool,
        tiers: Tiers,
        *,
        inside_rounds: bool,
        resumes: bool,
    ) -> None:
        self.index = index
        self.tiers = tiers
        self._resumes = resumes
        self._pool = pool
        self._inside_rounds = inside_rounds
        self._saves: list[SnapshotSave] = []
        # Requests whose restore has begun, by uid: what they wait for.
        self._asked: dict[int, Key] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.restored_tokens = 0
        self.saved_tokens = 0
        self.saved_bytes = 0
        self.restored_bytes = 0

    # Admission.

    def find(self, live: LiveRequest) -> Snapshot | None:
        """The longest usable prefix of a waiting request, pinned; none where its prompt must be
        scored, since a restored row has no logits."""
        if live.scores_prompt:
            return None
        snapshot = self.index.find(live.chain, self._limit(live, live.prefill_length))
        if snapshot is not None:
            self.index.pin(snapshot)
        return snapshot

    def _limit(self, live: LiveRequest, tokens: int) -> int:
        """Longest prefix of a request's first `tokens` that a restore can bring.

        A plan must hold the ids of its shared pages, and of a penalised request that was preempted
        the generated tokens in it.
        """
        limit = min(tokens - (0 if self._resumes else 1), MAX_SHARED_PAGES * PAGE_TOKENS)
        if live.reads_output:
            prompt = len(live.request.prompt_tokens)
            output = MAX_SHARED_PAGES - pages_for(limit)
            limit = min(limit, prompt + max(output, 0))
        return limit

    def is_restoring(self, live: LiveRequest) -> bool:
        """Whether a waiting request's prefix is on its way from the host or from disk.

        The restore begins here, once per request, where it saves a page or more beyond what the
        device holds. Others may be admitted meanwhile.
        """
        tiers = self.tiers
        if not tiers.enabled or live.scores_prompt:
            return False
        asked = self._asked.get(live.uid)
        if asked is not None and not tiers.is_stranded(asked):
            return tiers.is_restoring(asked)
        limit = self._limit(live, live.prefill_length)
        kept = tiers.find(live.chain, limit)
        if kept is None:
            return False
        found = self.index.find(live.chain, limit)
        if kept.tokens - (found.tokens if found is not None else 0) < PAGE_TOKENS:
            return False
        if not tiers.is_restoring(kept.key):
            if not tiers.may_restore:
                return True
            if not tiers.restore(kept):
                return False
        self._asked[live.uid] = kept.key
        return True

    def is_in_the_making(self, live: LiveRequest, running: Iterable[LiveRequest]) -> bool:
        """Whether a running request is about to leave a snapshot that saves `live` a page at least.

        So branches of one prompt that arrive together consume it once. The wait ends with that
        prompt's prefill, whatever becomes of its snapshot.
        """
        if not self.index.holds_any or live.preemptions or live.scores_prompt:
            return False
        prompt = len(live.request.prompt_tokens)
        places: list[int] = []
        for other in running:
            if other.preemptions:
                continue
            whole = len(other.request.prompt_tokens)
            for end in (_last_boundary(other), whole):
                ahead = other.consumed_tokens < end <= prompt
                if ahead and other.chain.key(end) == live.chain.key(end):
                    places.append(end)
        if not places:
            return False
        limit = prompt - (0 if self._resumes else 1)
        found = self.index.find(live.chain, limit)
        return min(max(places), limit) - (found.tokens if found else 0) >= PAGE_TOKENS

    def unpin(self, snapshot: Snapshot) -> None:
        """A found snapshot is not used after all."""
        self.index.unpin(snapshot)

    def admitted(self, live: LiveRequest, snapshot: Snapshot | None) -> None:
        """The request got its slot, and will start from `snapshot`."""
        tokens = snapshot.tokens if snapshot is not None else 0
        if not live.preemptions:
            self.queried_tokens += len(live.request.prompt_tokens)
            self.hit_tokens += tokens
            live.cached_tokens = tokens
        self._stop_awaiting(live)
        self._asked.pop(live.uid, None)
        self.restored_tokens += tokens
        if snapshot is not None:
            self.restored_bytes += self.index.bytes_of(snapshot)
            self.tiers.used(snapshot.key)
            self.index.hit(snapshot)
            live.snapshot = snapshot
            live.planned_tokens = snapshot.tokens
            live.consumed_tokens = snapshot.tokens
            live.granted_pages = len(snapshot.shared_pages)

    def release(self, live: LiveRequest) -> None:
        """The request ended, perhaps before its first plan."""
        self.leave(live)
        self._stop_awaiting(live)
        self._asked.pop(live.uid, None)

    def leave(self, live: LiveRequest) -> None:
        """The request no longer needs the snapshot that it was to start from."""
        if live.snapshot is not None:
            self.index.unpin(live.snapshot)
            live.snapshot = None

    def _stop_awaiting(self, live: LiveRequest) -> None:
        if live.kept is not None:
            live.kept.awaited -= 1
            live.kept = None

    # Preemption.

    def preempted(self, live: LiveRequest, short_pages: int) -> bool:
        """Keep the state of a request that is about to give its pages up, if it pays.

        A snapshot pays if it saves a page or more of recomputation, and if those who are short get
        `short_pages` without it; else it would be dropped before anybody reads it. The request's
        present state is tried first, then its last page boundary, which spares the open page. Both
        are exact: its rounds have drained.

        Returns:
            Whether there is a snapshot now that spares all but less than a page of recomputation.
        """
        if not live.started:
            return live.snapshot is not None
        for tokens, live_state in ((live.consumed_tokens, True), (live.published_tokens, False)):
            if self._pays(live, tokens, short_pages):
                self._save(live, tokens, live_state=live_state, is_needed=True)
                break
        found = self.index.find(live.chain, self._limit(live, live.consumed_tokens))
        if found is None or live.consumed_tokens - found.tokens >= PAGE_TOKENS:
            return False
        live.kept = found
        found.awaited += 1
        return True

    def _pays(self, live: LiveRequest, tokens: int, short_pages: int) -> bool:
        if not self.index.holds_any or tokens > self._limit(live, live.consumed_tokens):
            return False
        found = self.index.find(live.chain, tokens)
        if tokens - (found.tokens if found else 0) < PAGE_TOKENS:
            return False
        granted, reserved = self._pool.count_of(live.uid)
        given_up = self._pool.pages_of_its_own(live.uid, granted) + reserved - granted
        held = self._pool.pages_of_its_own(live.uid, pages_for(tokens))
        return self._pool.free_pages + given_up - held >= short_pages

    # Planning.

    def take_saves(self) -> tuple[SnapshotSave, ...]:
        """Saves that the plan being built must carry."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def restore(self, live: LiveRequest) -> SlotRestore | None:
        """The restore of a request's first plan; its own pages are granted already."""
        snapshot = live.snapshot
        if snapshot is None:
            return None
        self.release(live)
        last = len(snapshot.shared_pages)
        return SlotRestore(
            slot=live.slot,
            epoch=live.epoch,
            row=snapshot.row,
            consumed=snapshot.tokens,
            source_page=snapshot.last_page,
            target_page=self._pool.pages_of(live.uid)[last],
        )

    def chunk_end(self, live: LiveRequest, end: int) -> int:
        """Where a chunk through `end` is cut short: at the prompt's last page boundary, if that is
        to be kept."""
        boundary = _last_boundary(live)
        if live.preemptions:
            return end
        if not live.planned_tokens < boundary < end or not self.index.wants(live.chain, boundary):
            return end
        return boundary

    def capture(self, live: LiveRequest, end: int) -> tuple[SnapshotSave, Snapshot] | None:
        """The snapshot that a chunk ending at `end` takes, if that is a kept place."""
        ends = (_last_boundary(live), len(live.request.prompt_tokens))
        if live.preemptions or end not in ends:
            return None
        snapshot = self.index.claim(live.chain, end)
        if snapshot is None:
            return None
        return SnapshotSave(live.slot, live.epoch, end, snapshot.row, True), snapshot

    # Harvest.

    def harvested(
        self,
        captures: Sequence[Capture],
        lanes: Sequence[LiveRequest],
        records: Sequence[LaneRecord],
    ) -> None:
        """Publish what a prefill's chunks left, before its requests give pages back."""
        for capture in captures:
            live, record, snapshot = lanes[capture.lane], records[capture.lane], capture.snapshot
            ran = record.status & Status.ACTIVE and not record.status & FAULTS
            if ran and record.consumed == snapshot.tokens:
                self._publish(live, snapshot)
            else:
                self.index.abandon(snapshot)

    def advanced(self, live: LiveRequest, before: int) -> None:
        """A round has moved a request from `before` consumed tokens; its tokens are known."""
        boundary = live.consumed_tokens // PAGE_TOKENS * PAGE_TOKENS
        if boundary <= before:
            return
        if boundary != live.consumed_tokens and not self._inside_rounds:
            live.published_tokens = 0
            return
        live.published_tokens = boundary
        distance = (boundary - _last_boundary(live)) // PAGE_TOKENS
        if distance < 1 or distance & (distance - 1):
            return
        # What lies behind a stop was never part of the text.
        prompt = len(live.request.prompt_tokens)
        if boundary <= prompt + live.stops.generated_tokens:
            self._save(live, boundary, live_state=False)

    def finished(self, live: LiveRequest, record: LaneRecord) -> None:
        """A request ended well; keep its end if the device ended it there too, for then no further
        round changes the slot."""
        ended = record.status & (Status.EOS | Status.LENGTH)
        if ended and live.generated_tokens == live.stops.generated_tokens:
            self._save(live, live.consumed_tokens, live_state=True)

    def check_integrity(self, holders: Iterable[LiveRequest]) -> None:
        """Compare pins with requests that have not started; then as `PrefixIndex.check_integrity`.

        Raises:
            ContractViolation: a snapshot is pinned by nobody, or not by its request.
        """
        waiting = [live.snapshot.row for live in holders if live.snapshot is not None]
        pinned = sorted(waiting + self.tiers.pinned_rows())
        counted = sorted(s.row for s in self.index for _ in range(s.pins))
        if pinned != counted:
            raise ContractViolation(f"rows {pinned} wait to be restored, {counted} are pinned")
        self.index.check_integrity()
        self.tiers.book.check_integrity()

    def _save(
        self, live: LiveRequest, tokens: int, *, live_state: bool, is_needed: bool = False
    ) -> None:
        snapshot = self.index.claim(live.chain, tokens, is_needed=is_needed)
        if snapshot is None:
            return
        self._saves.append(SnapshotSave(live.slot, live.epoch, tokens, snapshot.row, live_state))
        self._publish(live, snapshot)

    def _publish(self, live: LiveRequest, snapshot: Snapshot) -> None:
        self.index.publish(snapshot, self._pool.pages_of(live.uid))
        self.saved_tokens += snapshot.tokens
        self.saved_bytes += self.index.bytes_of(snapshot)
        self.tiers.published(snapshot)


def _last_boundary(live: LiveRequest) -> int:
    """The prompt's last page boundary; 0 = it has none."""
    return len(live.request.prompt_tokens) // PAGE_TOKENS * PAGE_TOKENS

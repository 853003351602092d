"""When prefixes move between device, host and disk (contract: M7). Used by the controller's thread.

    published on the device -> STORE -> in host -> WRITE on every rank -> SEAL -> on disk
    wanted by a request     -> (READ ->) LOAD into a claimed row and pages -> published there

Everything below the device tier is a copy, made as soon as there is time, so an eviction moves
nothing and costs nothing. Orders run beside the rounds (`contracts.tiers`); what one touches is
pinned, claimed or busy until every rank has reported it. A request that wants a prefix back is not
admitted before that; nobody else waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from flare_ray.contracts.plan import MAX_SHARED_PAGES, SnapshotSave
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import (
    MAX_OPEN_ORDERS,
    Tier,
    TierMove,
    TierOrder,
    TierOutcome,
)
from flare_ray.controller.paging.chain import Key, Trace
from flare_ray.controller.paging.disk import (
    FORMAT_VERSION,
    MAX_MANIFEST_PAGES,
    DiskDirectory,
    DiskManifest,
    PartFile,
    sealed,
)
from flare_ray.controller.paging.prefix import PrefixIndex, Snapshot
from flare_ray.controller.paging.tier_book import KeptPrefix, TierBook, TierCounts
from flare_ray.errors import ContractViolation

logger = logging.getLogger("ray.serve.flare")

MAX_STORES_A_ROW = 4
"""Snapshots that may wait to be copied, as a multiple of the device's rows: most of them have been
evicted before."""
MAX_STORES = 2
"""Copies to the host under way: one runs while the next one's order travels."""
MAX_RESTORES = 2
"""Restores under way; a row and pages are taken for each once it is in host memory."""
HEADER_ALLOWANCE = 128 * 1024
"""Bytes of a file's header and of the manifest, counted before they are written; their true size
counts after."""

TakeSaves = Callable[[], tuple[SnapshotSave, ...]]


@dataclass(slots=True)
class _Open:
    """An order that has not been reported by every rank, and what it works on."""

    move: TierMove
    kept: KeptPrefix
    snapshot: Snapshot | None = None


@dataclass(slots=True)
class _Restore:
    """A prefix on its way back, and where it comes from."""

    kept: KeptPrefix
    source: Tier
    started_ns: int


@dataclass(frozen=True, slots=True)
class TierLimits:
    """host_bytes / disk_bytes: most bytes of one rank, 0 = no such tier; speculation: snapshots
    hold drafter history."""

    host_bytes: int
    disk_bytes: int
    speculation: bool


class Tiers:
    """Host and disk tiers of one engine.

    Args:
        index: the device tier.
        disk: the engine's directory; None = no disk tier.
        clock: nanoseconds.
    Attributes:
        book: what is kept below the device.
        pending_moves: orders that some rank has not reported, and moves that have not begun; may be
            read by any thread.
        writes_stopped: why nothing more is written to disk, "" while it is.
        restore_times: (tier, seconds) of restores since they were last taken.
    """

    def __init__(
        self,
        index: PrefixIndex,
        limits: TierLimits,
        *,
        disk: DiskDirectory | None,
        clock: Callable[[], int],
    ) -> None:
        self.book = TierBook(limits.host_bytes, limits.disk_bytes if disk is not None else 0)
        self.pending_moves = 0
        self.writes_stopped = ""
        self.restore_times: list[tuple[Tier, float]] = []
        self._index = index
        self._disk = disk
        self._speculation = limits.speculation
        self._clock = clock
        self._ticket = 0
        self._open: dict[int, _Open] = {}
        self._ready: deque[TierOrder] = deque()
        self._to_store: deque[Snapshot] = deque()
        self._to_write: deque[KeptPrefix] = deque()
        self._restores: dict[Key, _Restore] = {}
        if disk is not None:
            self._adopt_stored(disk)
            self._count_pending()

    @property
    def enabled(self) -> bool:
        """Whether there is any tier below the device."""
        return self.book.regions.total_bytes > 0

    def _count_pending(self) -> None:
        """At the end of whatever changes it: another thread must not see a move between two of its
        steps."""
        waiting = len(self._to_store) + len(self._to_write) + len(self.book.deletions)
        self.pending_moves = len(self._open) + waiting

    # What the device tier does.

    def published(self, snapshot: Snapshot) -> None:
        """A snapshot became findable on the device: copy it when there is time.

        One of less than a page is not worth a request's wait, and one of more pages than a plan can
        name is never restored, so they are not copied.
        """
        restorable = PAGE_TOKENS <= snapshot.tokens <= MAX_SHARED_PAGES * PAGE_TOKENS
        if not self.enabled or not restorable:
            return
        if len(self._to_store) >= MAX_STORES_A_ROW * self._index.rows:
            self._to_store.popleft().awaits_copy = False
        snapshot.awaits_copy = True
        self._to_store.append(snapshot)
        self._count_pending()

    def used(self, key: Key) -> None:
        """A request starts from the device's copy of a prefix."""
        kept = self.book.get(key) if self.enabled else None
        if kept is not None:
            self.book.used(kept, hit=True)

    # Restores.

    def find(self, trace: Trace, limit: int) -> KeptPrefix | None:
        """The longest prefix below the device tier."""
        return self.book.find(trace, limit)

    def is_restoring(self, key: Key) -> bool:
        """Whether that prefix is on its way to the device."""
        return key in self._restores

    def is_stranded(self, key: Key) -> bool:
        """Whether that prefix is in host memory, and the device had no room for it; may be asked
        for once more then."""
        kept = self.book.get(key)
        return kept is not None and kept.unplaced

    @property
    def may_restore(self) -> bool:
        """Whether another restore may begin."""
        return len(self._restores) < MAX_RESTORES

    def restore(self, kept: KeptPrefix) -> bool:
        """Begin to bring a prefix back; False = no row, pages or host region can be had for it."""
        restore = _Restore(kept, Tier.HOST if kept.in_host else Tier.DISK, self._clock())
        if kept.in_host:
            return self._load(restore)
        num_bytes = self._index.bytes_for(kept.tokens)
        # Busy first: making room must not delete the very files that it is for.
        kept.busy += 1
        placed = self.book.host_place(kept, num_bytes, wanted=True)
        self.book.release(kept)
        if placed:
            self._restores[kept.key] = restore
            self._order(TierMove.READ, kept)
        return placed

    def _load(self, restore: _Restore) -> bool:
        """Begin the copy from the host; False = no row or too few pages can be had for it.

        They are taken here and not earlier: a slow disk keeps nothing from those who run.
        """
        kept = restore.kept
        snapshot = self._index.stage(kept.trace, kept.tokens)
        kept.unplaced = snapshot is None
        if snapshot is None:
            self._restores.pop(kept.key, None)
            return False
        self._restores[kept.key] = restore
        self._order(TierMove.LOAD, kept, snapshot)
        return True

    # The ranks.

    def take_orders(self, take_saves: TakeSaves) -> tuple[TierOrder, ...]:
        """Orders to send now.

        Args:
            take_saves: saves that no plan has carried yet; the first order that reads or writes
                rows carries them, for the order of the stream.
        """
        if not self.enabled:
            return ()
        self._begin_stores()
        self._begin_writes()
        self._order_deletions()
        sent: list[TierOrder] = []
        unsent = len(self._ready)
        while self._ready and len(self._open) - unsent < MAX_OPEN_ORDERS:
            order = self._ready.popleft()
            unsent -= 1
            if order.move in (TierMove.STORE, TierMove.LOAD):
                order = _with_saves(order, take_saves())
            sent.append(order)
        self._count_pending()
        return tuple(sent)

    def finished(self, outcome: TierOutcome) -> None:
        """Every rank has reported an order.

        Raises:
            ContractViolation: no such order is open.
        """
        work = self._open.pop(outcome.ticket, None)
        if work is None:
            raise ContractViolation(f"tier order {outcome.ticket} was reported, it is not open")
        done = {
            TierMove.STORE: self._stored,
            TierMove.LOAD: self._loaded,
            TierMove.WRITE: self._written,
            TierMove.READ: self._read,
            TierMove.SEAL: self._is_sealed,
            TierMove.DELETE: self._deleted,
        }[work.move]
        done(work, outcome)
        if work.move is not TierMove.DELETE:
            self.book.release(work.kept)
        self._count_pending()

    def clear(self, tiers: frozenset[Tier]) -> dict[Tier, int]:
        """Forget everything in some tiers; how many prefixes of each. Writing to disk resumes."""
        dropped = {}
        if Tier.DEVICE in tiers:
            while self._to_store:
                self._to_store.pop().awaits_copy = False
            dropped[Tier.DEVICE] = self._index.clear()
        for tier in (Tier.HOST, Tier.DISK):
            if tier in tiers:
                dropped[tier] = self.book.clear(tier)
        if Tier.DISK in tiers:
            self._to_write.clear()
            self.writes_stopped = ""
        self._count_pending()
        return dropped

    def pinned_rows(self) -> list[int]:
        """Rows that copies under way keep from being evicted."""
        stores = (work for work in self._open.values() if work.move is TierMove.STORE)
        return [work.snapshot.row for work in stores if work.snapshot is not None]

    # Down.

    def _begin_stores(self) -> None:
        stores = sum(work.move is TierMove.STORE for work in self._open.values())
        while self._to_store and stores < MAX_STORES:
            snapshot = self._to_store.popleft()
            snapshot.awaits_copy = False
            if self._index.get(snapshot.key) is not snapshot:
                continue  # evicted before there was time
            kept = self.book.get(snapshot.key)
            if kept is not None:
                self.book.used(kept, hit=False)
                if kept.offset >= 0:
                    continue
            else:
                kept = self.book.new(snapshot.trace, snapshot.tokens, hits=snapshot.hits)
            num_bytes = self._index.bytes_for(kept.tokens)
            is_new = self.book.get(kept.key) is None
            if not self.book.host_place(kept, num_bytes, wanted=False):
                continue
            if is_new:
                self.book.add(kept)
            self._index.pin(snapshot)
            self._order(TierMove.STORE, kept, snapshot)
            stores += 1

    def _stored(self, work: _Open, outcome: TierOutcome) -> None:
        kept, snapshot = work.kept, work.snapshot
        assert snapshot is not None
        self._index.unpin(snapshot)
        if outcome.fault:
            raise ContractViolation(f"a snapshot could not be copied to the host: {outcome.text}")
        if kept.doomed:
            return
        self.book.filled(kept)
        _count_saved(self.book.counts[Tier.HOST], kept, kept.num_bytes)
        if self._disk is not None and not kept.name:
            self._to_write.append(kept)

    def _begin_writes(self) -> None:
        """One snapshot at a time: a disk that is slower than the engine drops some, not all."""
        if self._disk is None or self.writes_stopped:
            self._to_write.clear()
            return
        writing = any(w.move in (TierMove.WRITE, TierMove.SEAL) for w in self._open.values())
        while self._to_write and not writing:
            kept = self._to_write.popleft()
            if not kept.in_host or kept.name or kept.doomed:
                continue
            if kept.tokens // PAGE_TOKENS > MAX_MANIFEST_PAGES:
                continue
            if not self.book.disk_place(kept, kept.num_bytes + HEADER_ALLOWANCE):
                continue
            kept.name = self._disk.new_stem()
            # What was evicted for it is deleted first, by the same threads.
            self._order_deletions()
            self._order(TierMove.WRITE, kept)
            writing = True

    def _written(self, work: _Open, outcome: TierOutcome) -> None:
        kept = work.kept
        if kept.doomed:
            return
        if outcome.fault:
            self._stop_writing(kept, outcome)
            return
        kept.checksums, kept.part_bytes = outcome.checksums, outcome.num_bytes
        self._order(TierMove.SEAL, kept)

    def _is_sealed(self, work: _Open, outcome: TierOutcome) -> None:
        kept = work.kept
        if kept.doomed:
            return
        if outcome.fault:
            self._stop_writing(kept, outcome)
            return
        self.book.resize_file(kept, kept.part_bytes + outcome.num_bytes)
        self.book.written(kept)
        _count_saved(self.book.counts[Tier.DISK], kept, kept.file_bytes)

    def _stop_writing(self, kept: KeptPrefix, outcome: TierOutcome) -> None:
        """The disk takes no more. What is on it stays usable; serving goes on without new files."""
        self.writes_stopped = outcome.text
        self._to_write.clear()
        self.book.drop_disk(kept)
        logger.error(
            "disk tier: nothing more is written, %s; free space and reset the disk tier "
            "(POST /admin/cache/reset), or restart the engine",
            outcome.text,
        )

    def _deleted(self, work: _Open, outcome: TierOutcome) -> None:
        if outcome.fault:
            logger.error("disk tier: files of %s remain: %s", work.kept.name, outcome.text)

    # Up.

    def _read(self, work: _Open, outcome: TierOutcome) -> None:
        kept = work.kept
        restore = self._restores[kept.key]
        if outcome.fault or kept.doomed:
            del self._restores[kept.key]
            if not kept.doomed:
                self._reject(kept, outcome)
            return
        self.book.filled(kept)
        self._load(restore)

    def _reject(self, kept: KeptPrefix, outcome: TierOutcome) -> None:
        """A stored snapshot cannot be used: say so once, and never try it again."""
        self.book.counts[Tier.DISK].corrupt += 1
        logger.error("disk tier: a snapshot of %d tokens is removed: %s", kept.tokens, outcome.text)
        self.book.drop_host(kept)
        self.book.drop_disk(kept)

    def _loaded(self, work: _Open, outcome: TierOutcome) -> None:
        kept, snapshot = work.kept, work.snapshot
        assert snapshot is not None
        restore = self._restores.pop(kept.key)
        if outcome.fault:
            raise ContractViolation(f"a snapshot could not be copied to the device: {outcome.text}")
        if kept.doomed:
            self._index.abandon(snapshot)
            return
        self.book.used(kept, hit=True)
        self._index.arrived(snapshot, kept.hits)
        counts = self.book.counts[restore.source]
        counts.restored_tokens += kept.tokens
        counts.restored_bytes += kept.num_bytes
        self.restore_times.append((restore.source, (self._clock() - restore.started_ns) / 1e9))

    # Orders.

    def _order_deletions(self) -> None:
        for gone in self.book.deletions:
            self._order(TierMove.DELETE, gone)
        self.book.deletions.clear()

    def _order(self, move: TierMove, kept: KeptPrefix, snapshot: Snapshot | None = None) -> None:
        self._ticket += 1
        on_disk = move not in (TierMove.STORE, TierMove.LOAD)
        order = TierOrder(
            ticket=self._ticket,
            move=move,
            entry=kept.entry,
            tokens=kept.tokens,
            offset=max(kept.offset, 0),
            speculation=self._speculation,
            row=snapshot.row if snapshot is not None else -1,
            pages=snapshot.pages if snapshot is not None and not on_disk else (),
            path=kept.name if on_disk else "",
            label=self._disk.label if on_disk and self._disk is not None else "",
            checksums=kept.checksums if move is TierMove.READ else (),
            manifest=self._manifest(kept) if move is TierMove.SEAL else b"",
        )
        if move is not TierMove.DELETE:
            kept.busy += 1
        self._open[order.ticket] = _Open(move, kept, snapshot)
        self._ready.append(order)

    def _manifest(self, kept: KeptPrefix) -> bytes:
        assert self._disk is not None
        pages = kept.tokens // PAGE_TOKENS
        return sealed(
            DiskManifest(
                version=FORMAT_VERSION,
                label=self._disk.label,
                tokens=kept.tokens,
                digests=tuple(kept.trace.digest(page).hex() for page in range(pages + 1)),
                tail=kept.key[1],
                parts=tuple(PartFile(kept.part_bytes, text) for text in kept.checksums),
            )
        )

    def _adopt_stored(self, disk: DiskDirectory) -> None:
        """Take over what an earlier engine left, oldest first; what exceeds the limit goes."""
        self.book.counts[Tier.DISK].corrupt += disk.rejected
        for stored in disk.found:
            kept = self.book.new(stored.trace, stored.tokens)
            kept.name, kept.checksums = stored.stem, stored.checksums
            if self.book.get(kept.key) is None and self.book.disk_place(kept, stored.file_bytes):
                self.book.written(kept)
                self.book.add(kept)
            else:
                self.book.deletions.append(kept)


def _with_saves(order: TierOrder, saves: tuple[SnapshotSave, ...]) -> TierOrder:
    if not saves:
        return order
    return msgspec.structs.replace(order, saves=saves)


def _count_saved(counts: TierCounts, kept: KeptPrefix, num_bytes: int) -> None:
    counts.saved_tokens += kept.tokens
    counts.saved_bytes += num_bytes

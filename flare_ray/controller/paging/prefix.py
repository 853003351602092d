"""Which prefixes have a snapshot on the device: rows, pages, and who goes first (contract: M4, M7).

A snapshot is complete or absent: its row and its pages restore every state group, so the longest
snapshot that is a prefix is the usable one.

Eviction takes the snapshot of the smallest worth, never a pinned one: a pin lasts from the choice
of a snapshot until the plan that restores it is built, or until all ranks have copied it. After
that the ordered stream protects it: whatever overwrites its row or pages runs later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.paging.chain import Key, TokenChain, Trace
from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.controller.paging.worth import Prefix, PrefixMap
from flare_ray.errors import ContractViolation


@dataclass(slots=True, eq=False)
class Snapshot(Prefix):
    """One restorable prefix.

    Attributes:
        row: snapshot row on every rank.
        pages: page ids of positions 0 .. N - 1; () until it is published or staged.
        pins: choices whose plan is not built yet, and copies under way.
        awaited: preempted requests that wait and will start from it.
        awaits_copy: it is to be copied to a lower tier, and that has not begun.
    """

    row: int = -1
    pages: tuple[int, ...] = ()
    pins: int = 0
    awaited: int = 0
    awaits_copy: bool = False

    @property
    def shared_pages(self) -> tuple[int, ...]:
        """Pages that a continuation may read but never writes: all but that of position N - 1,
        where its drafter's pair belongs."""
        return self.pages[: (self.tokens - 1) // PAGE_TOKENS]

    @property
    def last_page(self) -> int:
        """The page that a continuation copies."""
        return self.pages[-1]


class PrefixIndex:
    """Snapshots of one engine's device tier. Used by the controller's thread.

    Args:
        pool: pages that snapshots hold.
        rows: snapshot rows per rank; 0 = no snapshot is ever made.
        row_bytes / page_bytes: of one row and one page, on one rank; weigh evictions.
    Attributes:
        row_bytes: as given.
        evicted_tokens / evicted_bytes: totals over evictions.
    """

    def __init__(
        self, pool: PagePool, rows: int, *, row_bytes: int = 1, page_bytes: int = 1
    ) -> None:
        self._pool = pool
        self.row_bytes = max(row_bytes, 1)
        self._page_bytes = page_bytes
        self._free_rows = list(range(rows - 1, -1, -1))
        self._rows = rows
        self._map: PrefixMap[Snapshot] = PrefixMap()
        self._claimed: dict[Key, Snapshot] = {}
        self._tick = 0
        self.evicted_tokens = 0
        self.evicted_bytes = 0
        pool.evict_with(self.evict_for_pages)

    def __iter__(self) -> Iterator[Snapshot]:
        """Published snapshots."""
        return iter(self._map)

    def __len__(self) -> int:
        """Number of published snapshots."""
        return len(self._map)

    @property
    def holds_any(self) -> bool:
        """Whether there are rows at all."""
        return self._rows > 0

    @property
    def rows(self) -> int:
        """Rows of a rank."""
        return self._rows

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank."""
        return self._page_bytes

    def bytes_of(self, snapshot: Snapshot) -> int:
        """Bytes on one rank, pages that others hold too included."""
        return self.bytes_for(snapshot.tokens)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of a snapshot of `tokens` tokens on one rank: its row and its pages."""
        return self.row_bytes + self._page_bytes * pages_for(tokens)

    def find(self, chain: TokenChain, limit: int) -> Snapshot | None:
        """The longest snapshot that holds the chain's first tokens, `limit` of them at most."""
        return self._map.find(chain, limit)

    def get(self, key: Key) -> Snapshot | None:
        """The published snapshot of exactly that key."""
        return self._map.get(key)

    def pin(self, snapshot: Snapshot) -> None:
        """Keep a published snapshot until `unpin`."""
        snapshot.pins += 1

    def unpin(self, snapshot: Snapshot) -> None:
        """What it was pinned for is done, or will never be."""
        snapshot.pins -= 1

    def hit(self, snapshot: Snapshot) -> None:
        """A request starts from the snapshot."""
        snapshot.count_hit()
        self._tick += 1
        snapshot.used = self._tick

    def wants(self, chain: TokenChain, tokens: int) -> bool:
        """Whether a snapshot of the chain's first `tokens` would be new."""
        if not self._rows:
            return False
        key = chain.key(tokens)
        return self._map.get(key) is None and key not in self._claimed

    def claim(self, chain: TokenChain, tokens: int, *, is_needed: bool = False) -> Snapshot | None:
        """A row for a new snapshot, which nobody finds before `publish`.

        Args:
            is_needed: a request waits for it, so it displaces whatever is worth least.
        Returns:
            None if that prefix has a snapshot or a claim already, or if no row can be freed for it:
            everything kept is pinned or worth more.
        """
        if not self._rows:
            return None
        key = chain.key(tokens)
        if key in self._claimed:
            return None
        # Also where the claim is refused: what keeps others out grows older by it.
        self._tick += 1
        existing = self._map.get(key)
        if existing is not None:
            existing.used = self._tick
            return None
        newcomer = Snapshot(chain, tokens, used=self._tick)
        self._map.offer(newcomer)
        limit = math.inf if is_needed else self._worth(newcomer)
        if not self._free_rows and not self._evict_below(limit):
            return None
        return self._claim(newcomer)

    def stage(self, trace: Trace, tokens: int) -> Snapshot | None:
        """A row and pages for a snapshot that comes back from another tier; to be published by
        `arrived`. A request waits for it, so it displaces whatever is worth least.

        Returns:
            None if no row or too few pages can be freed.
        """
        snapshot = Snapshot(trace, tokens)
        is_known = snapshot.key in self._claimed or self._map.get(snapshot.key) is not None
        if is_known or not (self._free_rows or self.evict()):
            return None
        self._claim(snapshot)
        pages = self._pool.take(pages_for(tokens))
        if pages is None:
            self.abandon(snapshot)
            return None
        snapshot.pages = pages
        return snapshot

    def arrived(self, snapshot: Snapshot, hits: int) -> None:
        """A staged snapshot is whole on every rank: make it findable."""
        del self._claimed[snapshot.key]
        snapshot.hits, snapshot.used = hits, self._tick
        self._map.add(snapshot)

    def publish(self, snapshot: Snapshot, pages: Sequence[int]) -> None:
        """Make a claim findable: its row will be written before anything that restores it runs.

        Args:
            pages: page-table entries of the request whose state it is, from the first on.
        """
        del self._claimed[snapshot.key]
        snapshot.pages = tuple(pages[: pages_for(snapshot.tokens)])
        self._pool.hold(snapshot.pages)
        snapshot.used = self._tick
        self._map.add(snapshot)

    def abandon(self, snapshot: Snapshot) -> None:
        """Give a claim up."""
        del self._claimed[snapshot.key]
        self._pool.drop(snapshot.pages)
        snapshot.pages = ()
        self._set_free(snapshot.row)

    def evict(self) -> bool:
        """Drop the least valuable snapshot; False if every one is pinned."""
        return self._evict_below(math.inf)

    def evict_for_pages(self) -> bool:
        """Drop the least valuable of those whose pages no request shares entirely.

        Each one brings a cached page nearer to being free; the others would bring none.
        """
        is_cached = self._pool.is_cached
        return self._evict_below(math.inf, lambda s: any(map(is_cached, reversed(s.pages))))

    def clear(self) -> int:
        """Drop every snapshot that is not pinned; how many."""
        dropped = [snapshot for snapshot in self if not snapshot.pins]
        for snapshot in dropped:
            self._remove(snapshot)
        return len(dropped)

    def check_integrity(self) -> None:
        """Recount rows, and the pool's pages against those of all snapshots.

        Raises:
            ContractViolation: a row is lost or used twice; as `PagePool.check_integrity`.
        """
        rows = [*self._free_rows, *(s.row for s in self), *(s.row for s in self._claimed.values())]
        if sorted(rows) != list(range(self._rows)):
            raise ContractViolation(
                f"prefix index: rows {sorted(rows)} are accounted for, {self._rows} exist"
            )
        if any(len(s.pages) != pages_for(s.tokens) for s in self):
            raise ContractViolation("prefix index: a snapshot lacks pages of its prefix")
        holders = [*self, *self._claimed.values()]
        self._pool.check_integrity(page for snapshot in holders for page in snapshot.pages)

    def _worth(self, snapshot: Snapshot) -> float:
        return snapshot.worth(self.bytes_of(snapshot), self._tick)

    def _evict_below(
        self, limit: float, may_go: Callable[[Snapshot], bool] = lambda snapshot: True
    ) -> bool:
        """Drop the least valuable that may go, if it is worth less than `limit`; what a preempted
        request waits for goes last, and never for a new snapshot of finite worth.

        Without a limit something has to go: then what can come back from a lower tier, or need not,
        goes before what would be lost.
        """
        has_to_go = limit == math.inf
        worst = min(
            (s for s in self if not s.pins and may_go(s)),
            key=lambda s: (s.awaited > 0, has_to_go and s.awaits_copy, self._worth(s)),
            default=None,
        )
        if worst is None or (not has_to_go and (worst.awaited or self._worth(worst) >= limit)):
            return False
        self.evicted_tokens += worst.tokens
        self.evicted_bytes += self.bytes_of(worst)
        self._remove(worst)
        return True

    def _claim(self, snapshot: Snapshot) -> Snapshot:
        snapshot.row = self._free_rows.pop()
        if self._pool.freed is not None:
            self._pool.freed.rows.discard(snapshot.row)
        self._claimed[snapshot.key] = snapshot
        return snapshot

    def _remove(self, snapshot: Snapshot) -> None:
        self._map.remove(snapshot)
        self._pool.drop(snapshot.pages)
        self._set_free(snapshot.row)

    def _set_free(self, row: int) -> None:
        self._free_rows.append(row)
        if self._pool.freed is not None:
            self._pool.freed.rows.add(row)

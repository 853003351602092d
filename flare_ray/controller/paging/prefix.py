"""Which prefixes have a snapshot: a hash chain over token ids, rows, and who goes first
(contract: M4, M7).

A prefix of N = 64 k + r tokens is found by the digest of its first k pages, chained page by page
from the tenant's salt, and by its last r tokens as they are. A snapshot is complete or absent: its
row and its pages restore every state group, so the longest snapshot that is a prefix is the usable
one.

Eviction takes the smallest of tokens saved / bytes held / age since last use, never a pinned
snapshot: a pin lasts from the choice of a snapshot until the plan that restores it is built. After
that the ordered stream protects it: whatever overwrites its row or pages runs later.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.errors import ContractViolation

DIGEST_BYTES = 16

Key = tuple[bytes, tuple[int, ...]]
"""Digest of the whole pages, and the tokens behind them."""


class TokenChain:
    """Tokens of one request and the digests of their whole pages.

    Args:
        salt: prefixes are shared among equal salts only.
    Attributes:
        tokens: prompt, then every generated token.
    """

    __slots__ = ("_digests", "tokens")

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self.tokens = list(tokens)
        self._digests = [hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()]

    def digest(self, pages: int) -> bytes:
        """Of the first `pages` whole pages."""
        digests, tokens = self._digests, self.tokens
        while len(digests) <= pages:
            start = (len(digests) - 1) * PAGE_TOKENS
            page = array("q", tokens[start : start + PAGE_TOKENS]).tobytes()
            digests.append(hashlib.blake2b(digests[-1] + page, digest_size=DIGEST_BYTES).digest())
        return digests[pages]

    def key(self, tokens: int) -> Key:
        """Key of the first `tokens` tokens."""
        pages = tokens // PAGE_TOKENS
        return self.digest(pages), tuple(self.tokens[pages * PAGE_TOKENS : tokens])


@dataclass(slots=True, eq=False)
class Snapshot:
    """One restorable prefix.

    Attributes:
        tokens: N, at least 1.
        row: snapshot row on every rank.
        pages: page ids of positions 0 .. N - 1; () until it is published.
        used: tick of its last use.
        pins: choices whose plan is not built yet.
    """

    key: Key
    tokens: int
    row: int
    pages: tuple[int, ...] = ()
    used: int = 0
    pins: int = 0

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
        evicted_tokens: total over evictions.
    """

    def __init__(
        self, pool: PagePool, rows: int, *, row_bytes: int = 1, page_bytes: int = 1
    ) -> None:
        self._pool = pool
        self.row_bytes = max(row_bytes, 1)
        self._page_bytes = page_bytes
        self._free_rows = list(range(rows - 1, -1, -1))
        self._rows = rows
        self._by_pages: dict[bytes, dict[tuple[int, ...], Snapshot]] = {}
        self._claimed: dict[Key, Snapshot] = {}
        self._tick = 0
        self.evicted_tokens = 0
        pool.evict_with(self.evict)

    def __iter__(self) -> Iterator[Snapshot]:
        """Published snapshots."""
        for tails in self._by_pages.values():
            yield from tails.values()

    def __len__(self) -> int:
        """Number of published snapshots."""
        return sum(map(len, self._by_pages.values()))

    @property
    def holds_any(self) -> bool:
        """Whether there are rows at all."""
        return self._rows > 0

    def bytes_of(self, snapshot: Snapshot) -> int:
        """Bytes on one rank, pages that others hold too included."""
        return self.row_bytes + self._page_bytes * len(snapshot.pages)

    def find(self, chain: TokenChain, limit: int) -> Snapshot | None:
        """The longest snapshot that holds the chain's first tokens, `limit` of them at most."""
        if not self._by_pages:
            return None
        for pages in range(limit // PAGE_TOKENS, -1, -1):
            tails = self._by_pages.get(chain.digest(pages))
            if not tails:
                continue
            start = pages * PAGE_TOKENS
            found = [
                snapshot
                for tail, snapshot in tails.items()
                if snapshot.tokens <= limit and tuple(chain.tokens[start : snapshot.tokens]) == tail
            ]
            if found:
                return max(found, key=lambda snapshot: snapshot.tokens)
        return None

    def pin(self, snapshot: Snapshot) -> None:
        """Keep a published snapshot until `unpin`, and count it as used now."""
        snapshot.pins += 1
        self._touch(snapshot)

    def unpin(self, snapshot: Snapshot) -> None:
        """The plan that restores it is built, or will never be."""
        snapshot.pins -= 1

    def wants(self, chain: TokenChain, tokens: int) -> bool:
        """Whether a snapshot of the chain's first `tokens` would be new."""
        if not self._rows:
            return False
        digest, tail = key = chain.key(tokens)
        return tail not in self._by_pages.get(digest, {}) and key not in self._claimed

    def claim(self, chain: TokenChain, tokens: int) -> Snapshot | None:
        """A row for a new snapshot, which nobody finds before `publish`.

        Returns:
            None if that prefix has a snapshot or a claim already, or if no row can be freed.
        """
        if not self._rows:
            return None
        digest, tail = key = chain.key(tokens)
        existing = self._by_pages.get(digest, {}).get(tail)
        if existing is not None:
            self._touch(existing)
        if existing is not None or key in self._claimed:
            return None
        if not self._free_rows and not self.evict():
            return None
        snapshot = Snapshot(key, tokens, self._free_rows.pop())
        self._claimed[key] = snapshot
        return snapshot

    def publish(self, snapshot: Snapshot, pages: Sequence[int]) -> None:
        """Make a claim findable: its row will be written before anything that restores it runs.

        Args:
            pages: page-table entries of the request whose state it is, from the first on.
        """
        del self._claimed[snapshot.key]
        snapshot.pages = tuple(pages[: pages_for(snapshot.tokens)])
        self._pool.hold(snapshot.pages)
        digest, tail = snapshot.key
        self._by_pages.setdefault(digest, {})[tail] = snapshot
        self._touch(snapshot)

    def abandon(self, snapshot: Snapshot) -> None:
        """Give a claim up."""
        del self._claimed[snapshot.key]
        self._free_rows.append(snapshot.row)

    def evict(self) -> bool:
        """Drop the least valuable snapshot; False if every one is pinned."""
        worst = min((s for s in self if not s.pins), key=self._value, default=None)
        if worst is None:
            return False
        self.evicted_tokens += worst.tokens
        self._remove(worst)
        return True

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
        self._pool.check_integrity(page for snapshot in self for page in snapshot.pages)

    def _touch(self, snapshot: Snapshot) -> None:
        self._tick += 1
        snapshot.used = self._tick

    def _value(self, snapshot: Snapshot) -> float:
        age = self._tick - snapshot.used + 1
        return snapshot.tokens / self.bytes_of(snapshot) / age

    def _remove(self, snapshot: Snapshot) -> None:
        digest, tail = snapshot.key
        del self._by_pages[digest][tail]
        if not self._by_pages[digest]:
            del self._by_pages[digest]
        self._pool.drop(snapshot.pages)
        self._free_rows.append(snapshot.row)

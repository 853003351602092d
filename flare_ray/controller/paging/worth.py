"""Which kept prefix goes first: one formula for every tier, and the map that finds prefixes.

    worth = tokens saved * (1 + hits) / bytes held / age

*Tokens saved* are those beyond the longest other prefix of it that the tier holds: without it, a
request would start from there. *Hits* are the restores it has served, at most `MAX_HITS`, so that a
prefix that many requests begin with outlives the ends of single requests, but not for ever. *Age*
counts the tier's uses (hits and offers of new prefixes) since it was last used, itself included, so
worth falls towards zero for whatever nobody asks for. A new prefix displaces only what is worth
less than itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.paging.chain import Key, Trace

MAX_HITS = 15
"""Hits that count: a prefix that was popular once survives sixteen times as long as another."""


@dataclass(slots=True, eq=False)
class Prefix:
    """One kept prefix.

    Attributes:
        trace: what it consists of; may go on beyond it.
        tokens: N, at least 1.
        key: of the first N tokens of `trace`.
        used: count of uses of its tier at its last one.
        hits: requests that started from it.
        parent: the longest other prefix of it in the same map.
        children: those whose parent it is.
    """

    trace: Trace
    tokens: int
    key: Key = field(init=False)
    used: int = 0
    hits: int = 0
    parent: Prefix | None = field(init=False, default=None)
    children: set[Prefix] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.key = self.trace.key(self.tokens)

    @property
    def saved_tokens(self) -> int:
        """Tokens that would have to be consumed again without it."""
        return self.tokens - (self.parent.tokens if self.parent is not None else 0)

    def count_hit(self) -> None:
        """A request starts from it."""
        self.hits = min(self.hits + 1, MAX_HITS)

    def worth(self, num_bytes: int, now: int) -> float:
        """See the module's formula; `now` is the tier's count of uses."""
        age = max(now - self.used, 0) + 1
        return self.saved_tokens * (1 + self.hits) / max(num_bytes, 1) / age


Kept = TypeVar("Kept", bound=Prefix)


class PrefixMap(Generic[Kept]):
    """Prefixes by the digest of their whole pages, then by the tokens behind them."""

    def __init__(self) -> None:
        self._by_pages: dict[bytes, dict[tuple[int, ...], Kept]] = {}

    def __iter__(self) -> Iterator[Kept]:
        # Copies: statistics are counted by other threads, while this one adds and removes.
        for tails in list(self._by_pages.values()):
            yield from list(tails.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_pages.values()))

    def get(self, key: Key) -> Kept | None:
        """The prefix of exactly that key."""
        digest, tail = key
        return self._by_pages.get(digest, {}).get(tail)

    def offer(self, prefix: Kept) -> None:
        """Tell a prefix that is not in the map what it would save beyond it."""
        prefix.parent = self.find(prefix.trace, prefix.tokens - 1)

    def add(self, prefix: Kept) -> None:
        """Make a prefix findable whose key is not in the map."""
        self.offer(prefix)
        parent = prefix.parent
        # Without a parent it may stand between nothing and any other prefix without one.
        behind = list(parent.children) if parent is not None else [p for p in self if not p.parent]
        for other in behind:
            if other.tokens > prefix.tokens and other.trace.holds(prefix.key, prefix.tokens):
                _adopt(other, prefix)
        _adopt(prefix, parent)
        digest, tail = prefix.key
        self._by_pages.setdefault(digest, {})[tail] = prefix

    def remove(self, prefix: Kept) -> None:
        """Forget a prefix that is in the map."""
        digest, tail = prefix.key
        tails = self._by_pages[digest]
        del tails[tail]
        if not tails:
            del self._by_pages[digest]
        for child in list(prefix.children):
            _adopt(child, prefix.parent)
        _adopt(prefix, None)

    def find(self, trace: Trace, limit: int) -> Kept | None:
        """The longest prefix that holds the trace's first tokens, `limit` of them at most."""
        if not self._by_pages:
            return None
        for pages in range(limit // PAGE_TOKENS, -1, -1):
            tails = self._by_pages.get(trace.digest(pages))
            if not tails:
                continue
            found = [
                prefix
                for prefix in tails.values()
                if prefix.tokens <= limit and trace.holds(prefix.key, prefix.tokens)
            ]
            if found:
                return max(found, key=lambda prefix: prefix.tokens)
        return None


def _adopt(child: Prefix, parent: Prefix | None) -> None:
    if child.parent is not None:
        child.parent.children.discard(child)
    child.parent = parent
    if parent is not None:
        parent.children.add(child)

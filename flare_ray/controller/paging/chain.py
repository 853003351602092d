"""A hash chain over token ids, page by page from the tenant's salt (contract: M4).

A prefix of N = 64 k + r tokens is known by the digest of its first k pages and by its last r tokens
as they are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.errors import ContractViolation

DIGEST_BYTES = 16

Key = tuple[bytes, tuple[int, ...]]
"""Digest of the whole pages, and the tokens behind them."""


class Trace(Protocol):
    """What is known of the tokens of a prefix."""

    def digest(self, pages: int) -> bytes:
        """Of the first `pages` whole pages."""

    def key(self, tokens: int) -> Key:
        """Key of the first `tokens` tokens."""

    def holds(self, key: Key, tokens: int) -> bool:
        """Whether the first `tokens` tokens have that key."""


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

    def holds(self, key: Key, tokens: int) -> bool:
        """Whether the first `tokens` tokens are there and have that key."""
        digest, tail = key
        pages = tokens // PAGE_TOKENS
        whole = tokens <= len(self.tokens) and self.digest(pages) == digest
        return whole and tuple(self.tokens[pages * PAGE_TOKENS : tokens]) == tail


class StoredTrace:
    """A prefix whose tokens are no longer there, only its digests and its last partial page.

    Whether another prefix belongs to it is known where that one ends at a page boundary or in the
    same page; elsewhere it counts as a stranger, which costs an eviction's accuracy and no more.

    Args:
        digests: of 0, 1, .. k whole pages.
    """

    __slots__ = ("digests", "tail")

    def __init__(self, digests: tuple[bytes, ...], tail: tuple[int, ...]) -> None:
        self.digests = digests
        self.tail = tail

    def digest(self, pages: int) -> bytes:
        """Of the first `pages` whole pages; b"" beyond its own."""
        return self.digests[pages] if pages < len(self.digests) else b""

    def key(self, tokens: int) -> Key:
        """Key of the whole prefix.

        Raises:
            ContractViolation: another count than its own was asked for.
        """
        if tokens != (len(self.digests) - 1) * PAGE_TOKENS + len(self.tail):
            raise ContractViolation(f"the key of {tokens} tokens of a stored prefix is not known")
        return self.digests[-1], self.tail

    def holds(self, key: Key, tokens: int) -> bool:
        """Whether the first `tokens` tokens are known to have that key."""
        digest, tail = key
        pages = tokens // PAGE_TOKENS
        if self.digest(pages) != digest:
            return False
        last = pages == len(self.digests) - 1
        return not tail or (last and self.tail[: len(tail)] == tail)

"""Constants of the n-gram hash, computed from config.json alone.

The bigram and trigram that end at a token are mixed with odd 64-bit multipliers and reduced modulo
distinct primes, one per head; head h of a layer owns the table's rows from the sum of the earlier
primes on. The checkpoint stores the same constants, and the builder compares them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAYER_STRIDE = 10007


@dataclass(frozen=True, slots=True)
class HashConstants:
    """One layer's hash.

    Attributes:
        multipliers: one per token of the longest n-gram, the token itself first.
        primes: rows of each head, bigram heads first.
        offsets: each head's first row.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows that some hash may address."""
        return sum(self.primes)


@dataclass(frozen=True, slots=True)
class HashSettings:
    """vocab_size: of the tokens; size: longest n-gram; heads: per order; base: smallest number of
    rows of a head; seed: of the multipliers."""

    vocab_size: int
    size: int
    heads: int
    base: int
    seed: int


def hash_constants(settings: HashSettings, index: int) -> HashConstants:
    """Constants of the `index`-th layer that hashes n-grams, counted from 0 among those layers."""
    half = max(1, ((1 << 63) - 1) // settings.vocab_size // 2)
    base = settings.seed + _LAYER_STRIDE * index
    multipliers = tuple(
        2 * (_splitmix64(base + _GAMMA * (place + 1)) % half) + 1 for place in range(settings.size)
    )
    heads = (settings.size - 1) * settings.heads
    primes = primes_from(settings.base, (index + 1) * heads)[index * heads :]
    offsets = tuple(itertools.accumulate(primes[:-1], initial=0))
    return HashConstants(multipliers, primes, offsets)


def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes of at least `least`."""
    return tuple(itertools.islice(filter(_is_prime, itertools.count(max(least, 2))), count))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)

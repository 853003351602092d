"""Columns of hashed n-gram tables: prime buckets and multipliers, from numbers alone.

Multipliers are odd numbers so small that no product with an id leaves int64, and all are positive.
Buckets are primes handed out once over all tables of a model, so no two columns collide alike.
Imports no torch: a manifest is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MULTIPLIER_SEED = 10007
"""Times the layer's number: seed of its multipliers (published)."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """One table's columns: primes and offsets, (N - 1) * heads each; multipliers, N."""

    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    multipliers: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows that the columns need."""
        return self.offsets[-1] + self.primes[-1]


def bucket_layout(
    layers: Sequence[int], *, base: int, max_ngram: int, heads: int, compressed_ids: int
) -> tuple[Buckets, ...]:
    """The tables' columns, in the order of their layers.

    Args:
        layers: numbers of the layers that own a table.
        base: every n-gram size looks for primes from here on.
        compressed_ids: ids that are hashed; bounds the multipliers.
    """
    handed: set[int] = set()
    tables = []
    for layer in layers:
        primes = []
        for _ in range(max_ngram - 1):
            number = base - 1
            for _ in range(heads):
                number += 1
                while number in handed or not _is_prime(number):
                    number += 1
                handed.add(number)
                primes.append(number)
        bound = max(1, int(np.iinfo(np.int64).max) // compressed_ids // 2)
        drawn = np.random.default_rng(MULTIPLIER_SEED * layer).integers(
            0, bound, size=max_ngram, dtype=np.int64
        )
        offsets = [sum(primes[:place]) for place in range(len(primes))]
        multipliers = tuple(2 * int(value) + 1 for value in drawn)
        tables.append(Buckets(tuple(primes), tuple(offsets), multipliers))
    return tuple(tables)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))

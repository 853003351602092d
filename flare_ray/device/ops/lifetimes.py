"""Places in one block of memory for values that live for a while: few bytes hold them all."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
ALIGNMENT = 64
"""A cache line; also a multiple of every element's size."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value of `size` bytes that is used from step `first` to step `last`, both included."""

    size: int
    first: int
    last: int


class _Gaps:
    """Free ranges [start, end) in ascending order, and the end of what was ever used."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.top = 0

    def take(self, size: int) -> int:
        """Start of a free range: the smallest that fits, new memory if none does."""
        fitting = [r for r in self._ranges if r[1] - r[0] >= size]
        if not fitting:
            start = self.top
            self.top += size
            return start
        start, end = min(fitting, key=lambda r: (r[1] - r[0], r[0]))
        self._ranges.remove((start, end))
        if end - start > size:
            bisect.insort(self._ranges, (start + size, end))
        return start

    def give(self, start: int, end: int) -> None:
        """Return a range; neighbours become one."""
        place = bisect.bisect_left(self._ranges, (start, end))
        if place < len(self._ranges) and self._ranges[place][0] == end:
            end = self._ranges.pop(place)[1]
        if place and self._ranges[place - 1][1] == start:
            start = self._ranges.pop(place - 1)[0]
        bisect.insort(self._ranges, (start, end))


def assign_places(values: Mapping[K, Lifetime]) -> tuple[dict[K, int], int]:
    """Byte offsets such that no two values that live at one step overlap, and the bytes needed.

    Best fit in the order of first use, which is near the optimum for a chain of operators.
    """
    gaps = _Gaps()
    living: list[tuple[int, int, int]] = []
    places: dict[K, int] = {}
    for name, value in sorted(values.items(), key=lambda item: item[1].first):
        while living and living[0][0] < value.first:
            _, start, end = living.pop(0)
            gaps.give(start, end)
        size = -(-value.size // ALIGNMENT) * ALIGNMENT
        places[name] = gaps.take(size)
        bisect.insort(living, (value.last, places[name], places[name] + size))
    return places, gaps.top

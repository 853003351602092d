"""Which bytes of the host tier are taken: first fit over one arena, the same on every rank.

Ranks hold equal arenas and are told offsets, so one book serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from flare_ray.errors import ContractViolation

REGION_BYTES = 64
"""Regions begin and end at multiples of this: a cache line, and a multiple of every element."""

Region = tuple[int, int]
"""First byte and number of bytes."""


def region_size(num_bytes: int) -> int:
    """Bytes that a region of `num_bytes` takes."""
    return -(-num_bytes // REGION_BYTES) * REGION_BYTES


class Regions:
    """Free and taken bytes of an arena.

    Args:
        num_bytes: of the arena; a remainder below REGION_BYTES is never used.
    """

    def __init__(self, num_bytes: int) -> None:
        self.total_bytes = num_bytes // REGION_BYTES * REGION_BYTES
        self._gaps: list[Region] = [(0, self.total_bytes)] if self.total_bytes else []

    @property
    def gaps(self) -> tuple[Region, ...]:
        """Free regions, in order."""
        return tuple(self._gaps)

    @property
    def free_bytes(self) -> int:
        """Sum of the free regions."""
        return sum(size for _, size in self._gaps)

    def take(self, num_bytes: int) -> int | None:
        """First byte of a region now taken; None if no gap is large enough."""
        size = region_size(num_bytes)
        for index, (start, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[index : index + 1] = [(start + size, gap - size)] if gap > size else []
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Make a taken region free.

        Raises:
            ContractViolation: part of it is free already.
        """
        self._gaps = merged([*self._gaps, (start, region_size(num_bytes))])

    def fits_with(self, num_bytes: int, given: Iterable[Region]) -> bool:
        """Whether a region of `num_bytes` could be taken once `given` were free too."""
        gaps = merged([*self._gaps, *((start, region_size(size)) for start, size in given)])
        return any(size >= region_size(num_bytes) for _, size in gaps)


def merged(gaps: list[Region]) -> list[Region]:
    """Gaps in order, neighbours joined.

    Raises:
        ContractViolation: two overlap.
    """
    result: list[Region] = []
    for start, size in sorted(gaps):
        end = result[-1][0] + result[-1][1] if result else -1
        if start < end:
            raise ContractViolation(f"host region {start}..{start + size} is free twice")
        if start == end:
            result[-1] = (result[-1][0], result[-1][1] + size)
        else:
            result.append((start, size))
    return result

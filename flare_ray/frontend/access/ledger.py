"""Who has asked for how much: one bucket of requests and one of tokens per key.

A bucket holds a minute's worth and fills steadily, so an idle key may burst and the wait told to
a refused one is the time until what it asked for is there. Output is known only afterwards and is
booked then; it may put a bucket into debt, which later requests wait out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key; None = none."""

    requests_per_minute: int | None
    tokens_per_minute: int | None


class Ledger(Protocol):
    """Books shared by all HTTP replicas, or of a single one."""

    async def take(self, name: str, limits: Limits, *, requests: int, tokens: int) -> float:
        """Book both, or neither and answer the seconds until both would fit; 0 = booked."""

    async def spend(self, name: str, limits: Limits, *, tokens: int) -> None:
        """Book what was used already."""


class Bucket:
    """A quantity that fills at a steady rate up to its capacity.

    Args:
        capacity: units per minute, and the most it holds.
    """

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self.level = float(capacity)
        self._filled_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until `amount` is there; 0 = now."""
        gained = (now_s - self._filled_s) * self.capacity / MINUTE_S
        self.level = min(self.level + max(gained, 0.0), self.capacity)
        self._filled_s = now_s
        return max(amount - self.level, 0.0) * MINUTE_S / self.capacity


class LocalLedger:
    """Books of one process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    async def take(self, name: str, limits: Limits, *, requests: int, tokens: int) -> float:
        """See `Ledger.take`."""
        now_s = self._clock()
        wanted = [
            (bucket, amount)
            for kind, capacity, amount in (
                ("requests", limits.requests_per_minute, requests),
                ("tokens", limits.tokens_per_minute, tokens),
            )
            if (bucket := self._bucket(name, kind, capacity, now_s)) is not None and amount
        ]
        wait_s = max((bucket.wait_s(amount, now_s) for bucket, amount in wanted), default=0.0)
        if wait_s == 0.0:
            for bucket, amount in wanted:
                bucket.level -= amount
        return wait_s

    async def spend(self, name: str, limits: Limits, *, tokens: int) -> None:
        """See `Ledger.spend`."""
        now_s = self._clock()
        bucket = self._bucket(name, "tokens", limits.tokens_per_minute, now_s)
        if bucket is not None:
            bucket.wait_s(0, now_s)
            bucket.level -= tokens

    def _bucket(self, name: str, kind: str, capacity: int | None, now_s: float) -> Bucket | None:
        if capacity is None:
            self._buckets.pop((name, kind), None)
            return None
        bucket = self._buckets.get((name, kind))
        if bucket is None or bucket.capacity != capacity:
            bucket = self._buckets[name, kind] = Bucket(capacity, now_s)
        return bucket

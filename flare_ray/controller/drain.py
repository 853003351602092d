"""How fast the queue drains, and when a refused client may honestly come back (contract: C1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_WINDOW = 32
"""Departures that the rate is taken from."""


class DrainRate:
    """Requests and tokens that leave the queue for slots.

    The rate is that of the last 32 departures since the queue was last empty, up to now: a queue
    that stands still is told so. Clients that were refused before and told to come back are counted
    in front of a newly refused one, so that they do not all return for one place.

    Args:
        clock: nanoseconds.
        least_s: told while nothing is known, and the least that is ever told.
        most_s: the most that is ever told, >= least_s.
    """

    def __init__(self, clock: Callable[[], int], *, least_s: float, most_s: float) -> None:
        self._clock = clock
        self._least_s = least_s
        self._most_s = most_s
        self._since_ns = clock()
        self._left: deque[tuple[int, int]] = deque()
        self._refused = 0

    def filled(self) -> None:
        """The queue was empty and is no longer."""
        self._since_ns = self._clock()
        self._left.clear()
        self._refused = 0

    def left(self, tokens: int) -> None:
        """A request of so many tokens, prompt and budget, went from the queue to a slot."""
        self._left.append((self._clock(), tokens))
        self._refused = max(self._refused - 1, 0)
        if len(self._left) > _WINDOW:
            self._since_ns, _ = self._left.popleft()

    def refuse(self, requests: int, tokens: int) -> float:
        """Seconds after which another client finds room.

        Args:
            requests / tokens: what has to leave the queue for it; 0 = that bound is kept.
        """
        elapsed_s = (self._clock() - self._since_ns) / 1e9
        needed = 0.0
        if self._left:
            ahead = requests + self._refused
            freed = sum(tokens for _, tokens in self._left)
            needed = max(ahead / len(self._left), tokens / max(freed, 1))
        self._refused += 1
        wait_s = elapsed_s * needed if self._left else elapsed_s
        return min(max(wait_s, self._least_s), self._most_s)

"""The shared history: the last generated tokens of a loaded model's requests (contract: H1).

One ring in host memory, written in the order in which tokens are committed, so responses lie in it
interleaved. A token is known by its *sequence number*, which never repeats; its slot is that number
modulo the ring's size. Links lead from a token to the next one of the same response:

    number     40   41   42   43   44   45
    token      a0   b0   a1   b1   c0   a2
    following  42   43   45   -1   -1   -1

A place is a token with at least four (eight) generated tokens of its response in front of it. The
index holds the newest place for every such run of tokens, by tenant; it is entered when the token
behind the run is committed, so a place always has something to copy, and a text never finds its own
end. A place lives as long as its token: what follows it is newer, hence in the ring, too.

Prompts, restored prefixes, rejected drafts and rounds that failed never come here; a request that
is preempted goes on in the same response.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from flare_ray.controller.history.windows import (
    LONG_BYTES,
    LONG_MATCH,
    MOST_COPIES,
    SHORT_MATCH,
    Match,
    keys_of,
)

RING_TOKENS = 65_536
_NONE = -1


class HistoryRing:
    """Committed generated tokens across requests. Used by the controller's thread only.

    Args:
        size: tokens it holds; older ones are overwritten.
    """

    def __init__(self, size: int = RING_TOKENS) -> None:
        self._size = size
        self._tokens = array("i", [0]) * size
        self._following = array("q", [_NONE]) * size
        self._keys: list[tuple[bytes, ...]] = [()] * size
        self._tenants = [""] * size
        self._next = 0
        self._places: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return min(self._next, self._size)

    @property
    def num_keys(self) -> int:
        """Runs of tokens in the index, of all tenants."""
        return sum(map(len, self._places.values()))

    def find(self, tenant: str, window: bytes) -> Match | None:
        """The newest place of this tenant behind the same eight tokens, else behind the same four.

        Args:
            window: as `window_of`; may hold prompt tokens.
        """
        places = self._places.get(tenant)
        if places is None:
            return None
        for key in keys_of(window):
            place = places.get(key)
            if place is not None:
                length = LONG_MATCH if len(key) == LONG_BYTES else SHORT_MATCH
                return Match(self._text_from(place), length)
        return None

    def _text_from(self, place: int) -> tuple[int, ...]:
        found: list[int] = []
        while place != _NONE and len(found) < MOST_COPIES:
            slot = place % self._size
            found.append(self._tokens[slot])
            place = self._following[slot]
        return tuple(found)

    def _append(self, tenant: str, token: int, before: int, window: bytes) -> int:
        """Commit a token behind the one numbered `before`, -1 = none; returns its number."""
        number = self._next
        slot = number % self._size
        if number >= self._size:
            self._drop(slot, number - self._size)
        self._tokens[slot] = token
        self._following[slot] = _NONE
        # A response that pauses long enough finds its last token overwritten, and the slot another
        # response's.
        if before > number - self._size and before != _NONE:
            self._following[before % self._size] = number
        self._keys[slot], self._tenants[slot] = keys_of(window), tenant
        if self._keys[slot]:
            places = self._places.setdefault(tenant, {})
            for key in self._keys[slot]:
                places[key] = number
        self._next = number + 1
        return number

    def _drop(self, slot: int, number: int) -> None:
        """Forget the place that is overwritten; a newer one behind the same tokens stays."""
        keys = self._keys[slot]
        if not keys:
            return
        tenant = self._tenants[slot]
        places = self._places[tenant]
        for key in keys:
            if places.get(key) == number:
                del places[key]
        if not places:
            del self._places[tenant]


class Response:
    """One request's generated tokens on their way into a ring.

    Args:
        tenant: only requests of the same tenant find them.
    """

    __slots__ = ("_last", "_ring", "_tenant", "_window")

    def __init__(self, ring: HistoryRing, tenant: str) -> None:
        self._ring, self._tenant = ring, tenant
        self._last = _NONE
        self._window = b""

    def write(self, tokens: Sequence[int]) -> None:
        """Commit generated tokens, in order."""
        ring, tenant = self._ring, self._tenant
        for token, packed in zip(tokens, packed_tokens(tokens), strict=True):
            self._last = ring._append(tenant, token, self._last, self._window)
            self._window = (self._window + packed)[-LONG_BYTES:]


def packed_tokens(tokens: Sequence[int]) -> list[bytes]:
    """Each token as a window has it."""
    return [array("i", (token,)).tobytes() for token in tokens]

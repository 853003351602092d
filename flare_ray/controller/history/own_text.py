"""A request's own prompt and output as a source of copies (contract: H3).

The same exact indexes as the shared ring's, over one text that nobody else sees. A prompt is
indexed a step at a time, so that a long one delays no round; newer places replace older ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from flare_ray.controller.history.windows import (
    LONG_BYTES,
    LONG_MATCH,
    MOST_COPIES,
    SHORT_BYTES,
    SHORT_MATCH,
    TOKEN_BYTES,
    Match,
    keys_of,
)

STEP_TOKENS = 512
"""Tokens indexed at once: some 0.2 ms."""
MOST_PROMPT_TOKENS = 32_768
"""Last tokens of a prompt that are indexed: some 350 bytes of host memory each."""


class OwnText:
    """Indexes over one request's tokens.

    Args:
        tokens: prompt and output; the caller appends to it.
    """

    __slots__ = ("_indexed", "_places", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._indexed = max(SHORT_MATCH, len(tokens) - MOST_PROMPT_TOKENS)
        self._places: dict[bytes, int] = {}

    def catch_up(self) -> None:
        """Index the next STEP_TOKENS tokens at most; a token is a place of what is in front."""
        start = self._indexed
        end = min(len(self._tokens), start + STEP_TOKENS)
        first = max(0, start - LONG_MATCH)
        packed = array("i", self._tokens[first:end]).tobytes()
        places = self._places
        for place in range(start, end):
            at = (place - first) * TOKEN_BYTES
            places[packed[at - SHORT_BYTES : at]] = place
            if at >= LONG_BYTES:
                places[packed[at - LONG_BYTES : at]] = place
        self._indexed = max(start, end)

    def find(self, window: bytes) -> Match | None:
        """The newest indexed place behind the same eight tokens, else behind the same four."""
        for key in keys_of(window):
            place = self._places.get(key)
            if place is not None:
                length = LONG_MATCH if len(key) == LONG_BYTES else SHORT_MATCH
                return Match(tuple(self._tokens[place : place + MOST_COPIES]), length)
        return None

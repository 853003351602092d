"""Runs of tokens as keys of exact indexes, and what a look-up finds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from flare_ray.contracts.shapes import MAX_WIDTH

TOKEN_BYTES = array("i").itemsize
LONG_MATCH = 8
SHORT_MATCH = 4
"""Tokens in front of a place that must agree; the long match is asked for first (contract: H1)."""
LONG_BYTES = LONG_MATCH * TOKEN_BYTES
SHORT_BYTES = SHORT_MATCH * TOKEN_BYTES
MOST_COPIES = MAX_WIDTH - 1
"""Tokens that are copied from one place at most."""


class Match(NamedTuple):
    """A place whose tokens in front agree with a text's last ones.

    Attributes:
        tokens: what follows there, 1 .. MOST_COPIES tokens.
        length: LONG_MATCH or SHORT_MATCH, tokens that agree.
    """

    tokens: tuple[int, ...]
    length: int


def window_of(tokens: Sequence[int]) -> bytes:
    """Key of the last LONG_MATCH tokens of a text, fewer if it is shorter; its last SHORT_BYTES
    are the key of the short match."""
    return array("i", tokens[-LONG_MATCH:]).tobytes()


def keys_of(window: bytes) -> tuple[bytes, ...]:
    """The keys a window is looked up by, longest first."""
    if len(window) < SHORT_BYTES:
        return ()
    short = window[-SHORT_BYTES:]
    return (window, short) if len(window) == LONG_BYTES else (short,)

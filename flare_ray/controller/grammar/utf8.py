"""Which tokens keep an output well-formed UTF-8, by how its last character stands.

Free text and grammars of a client's own admit bytes that are no UTF-8; what a matcher allows is
narrowed by these masks. Tokens without bytes (EOS, control tokens) are held to a character's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

START, BROKEN = 0, 8
STATES = 8
"""0 = between characters; 1, 2, 3 = so many continuation bytes to come; 4 .. 7 = after E0, ED, F0,
F4, whose next byte has a narrower range (Unicode 15, table 3-7)."""
_AFTER_LEAD = ((0xC2, 0xDF, 1), (0xE1, 0xEC, 2), (0xEE, 0xEF, 2), (0xF1, 0xF3, 3))
_SPECIAL_LEADS = ((0xE0, 4), (0xED, 5), (0xF0, 6), (0xF4, 7))
_NEXT = ((1, 0x80, 0xBF, 0), (2, 0x80, 0xBF, 1), (3, 0x80, 0xBF, 2))
_NARROW = ((4, 0xA0, 0xBF, 1), (5, 0x80, 0x9F, 1), (6, 0x90, 0xBF, 2), (7, 0x80, 0x8F, 2))


def _transitions() -> NDArray[np.int8]:
    """[9, 257] next state by byte; column 256 = no byte."""
    table = np.full((STATES + 1, 257), BROKEN, dtype=np.int8)
    table[START, :0x80] = START
    for first, last, state in _AFTER_LEAD:
        table[START, first : last + 1] = state
    for lead, state in _SPECIAL_LEADS:
        table[START, lead] = state
    for state, first, last, after in (*_NEXT, *_NARROW):
        table[state, first : last + 1] = after
    table[:, 256] = np.arange(STATES + 1)
    return table


class Utf8Masks:
    """Masks and transitions of a vocabulary.

    Args:
        table: bytes by token id, b"" for control tokens.
    Attributes:
        masks: [8, words] int32; bit t % 32 of word t // 32 = token t may follow.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        transitions = _transitions()
        longest = max(map(len, table), default=0)
        letters = np.full((len(table), max(longest, 1)), 256, dtype=np.int16)
        for token, piece in enumerate(table):
            letters[token, : len(piece)] = np.frombuffer(piece, np.uint8)
        states = np.empty((STATES, len(table)), dtype=np.int8)
        for state in range(STATES):
            now = np.full(len(table), state, dtype=np.int8)
            for place in range(letters.shape[1]):
                now = transitions[now, letters[:, place]]
            states[state] = now
        silent = np.array([not piece for piece in table])
        states[1:, silent] = BROKEN
        self._states = states
        words = -(-len(table) // 32)
        allowed = np.zeros((STATES, words * 32), dtype=bool)
        allowed[:, : len(table)] = states != BROKEN
        self.masks: NDArray[np.int32] = np.packbits(allowed, axis=1, bitorder="little").view(
            np.int32
        )

    def after(self, state: int, token: int) -> int:
        """State behind `token`; BROKEN if it breaks a character."""
        return int(self._states[state, token])

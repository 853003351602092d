"""Incremental text of one output: bytes of tokens in, whole characters out.

Text is built from bytes, never by decoding a growing list of ids: a character may be spread over
tokens, and whether it is whole is a property of the bytes alone (known fault H-01: a decoder that
flushed whenever the next token began with a space).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDetokenizer:
    """Text deltas of one request; their concatenation equals the one-shot decode of all bytes.

    Invalid bytes become U+FFFD, one for each maximal ill-formed sequence (the Unicode standard's
    recommended practice, which is also what decoding everything at once gives).

    Args:
        token_bytes: bytes of each token id; b"" for tokens that are never text (special ones).
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._is_whole = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int], *, trim_bytes: int = 0) -> str:
        """Text that became complete with `tokens`.

        Args:
            tokens: visible ids, in order; ids past the table are padding of the vocabulary head and
                have no text.
            trim_bytes: bytes to leave out at the end of the last token (a stop string ended in it).
        """
        table = self._token_bytes
        pieces = [table[token] if token < len(table) else b"" for token in tokens]
        if trim_bytes and pieces:
            pieces[-1] = pieces[-1][: max(len(pieces[-1]) - trim_bytes, 0)]
        data = b"".join(pieces)
        if self._is_whole:
            # Nothing waits in the decoder, which is slower and would give the same.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)

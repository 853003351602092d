"""Where a request's output ends and what of it is visible (contract: K2).

The only stop logic of the project. It sees each generated token once, in order, and decides
identically whatever the number of tokens per round:

1. An EOS or a stop token id ends the request; that token is hidden. Under `min_tokens` the device
   offers none before its time.
2. A stop string ends it at the first byte at which any of them is complete (of several that
   complete there, the longest counts). The string is searched in the bytes of the output, so it
   may begin and end inside tokens. Visible is what stands before it, or through its end if the
   request includes stops.
   A string that is complete within the first `min_tokens` tokens is passed over.
3. A stop sequence of token ids likewise, at its last token; a string that is complete in the same
   token came first.
4. `max_tokens` generated tokens end it.

A token that may belong to a stop string or sequence that is not complete yet is held back; it is
handed out as soon as it cannot, or when the output ends otherwise. Whole tokens are handed out;
where a stop ends inside the last one, `trim_bytes` says how many of its bytes to drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from flare_ray.contracts.request import GenerationRequest


class End(msgspec.Struct, frozen=True):
    """Why and where an output ended.

    Attributes:
        completion_tokens: generated tokens through the ending one, EOS included.
        stop_reason: stop string, token id or token sequence that matched; None for EOS and length.
        ender: the EOS or stop token that ended it, which is not visible; None = something else did.
    """

    reason: Literal["stop", "length"]
    completion_tokens: int
    stop_reason: str | int | tuple[int, ...] | None = None
    ender: int | None = None


class Visible(msgspec.Struct, frozen=True):
    """What became visible with some tokens."""

    tokens: tuple[int, ...]
    trim_bytes: int = 0
    end: End | None = None


@dataclass(slots=True)
class _Held:
    """A generated token with its place in the output's bytes."""

    token: int
    start: int
    end: int


class _Pattern:
    """One stop, searched item by item across chunks (Knuth, Morris and Pratt 1977): the bytes of a
    string, or a sequence of tokens.

    `matched` is the length of the longest end of the output that begins the stop.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.matched = 0
        # fallback[n]: longest proper border of the first n + 1 items.
        self._fallback = [0] * len(text)
        border = 0
        for place in range(1, len(text)):
            while border and text[place] != text[border]:
                border = self._fallback[border - 1]
            border += text[place] == text[border]
            self._fallback[place] = border

    def scan(self, chunk: Sequence[int], ignored: int = 0) -> int:
        """Items of `chunk` through the end of the first match; 0 = none yet.

        A match that ends within the first `ignored` items is passed over.
        """
        if not self.matched and self.text[0] not in chunk:
            return 0
        matched, text = self.matched, self.text
        for place, item in enumerate(chunk, start=1):
            while matched and text[matched] != item:
                matched = self._fallback[matched - 1]
            if text[matched] == item:
                matched += 1
                if matched == len(text):
                    if place > ignored:
                        return place
                    matched = self._fallback[matched - 1]
        self.matched = matched
        return 0


def _first_match(
    patterns: Sequence[_Pattern], chunk: Sequence[int], ignored: int
) -> tuple[_Pattern | None, int]:
    """The stop that is complete first in `chunk`, the longest of several, and items through its
    end."""
    best, best_end = None, 0
    for pattern in patterns:
        end = pattern.scan(chunk, ignored)
        if not end:
            continue
        if best is None or (end, -len(pattern.text)) < (best_end, -len(best.text)):
            best, best_end = pattern, end
    return best, best_end


class OutputStops:
    """Turns one request's generated tokens into visible ones, and finds its end.

    Args:
        request: its stops, budget and EOS handling.
        eos_ids: the checkpoint's terminal tokens.
        token_bytes: bytes by token id.
    """

    __slots__ = (
        "_enders",
        "_eos_ids",
        "_held",
        "_include_stop",
        "_max_tokens",
        "_min_tokens",
        "_patterns",
        "_sequences",
        "_token_bytes",
        "_total_bytes",
        "generated_tokens",
    )

    def __init__(
        self, request: GenerationRequest, eos_ids: frozenset[int], token_bytes: Sequence[bytes]
    ) -> None:
        self.generated_tokens = 0
        self._eos_ids = frozenset() if request.ignore_eos else eos_ids
        self._enders = self._eos_ids.union(request.stop_token_ids)
        self._patterns = tuple(map(_Pattern, request.stop))
        self._sequences = tuple(map(_Pattern, request.stop_sequences))
        self._include_stop = request.include_stop
        self._max_tokens = request.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._token_bytes = token_bytes
        self._total_bytes = 0
        self._held: list[_Held] = []

    def push(self, tokens: Sequence[int]) -> Visible:
        """Take the next generated tokens; not to be called again once it has returned an end."""
        before = self.generated_tokens
        body = self._through_budget(tokens)
        ender = self._first_ender(body)
        text = body[:ender] if ender >= 0 else body
        if self._patterns or self._sequences:
            stopped = self._match(text, before)
            if stopped is not None:
                return stopped
        self.generated_tokens = before + len(text)
        end = self._plain_end(body[ender] if ender >= 0 else None)
        if not self._patterns and not self._sequences:
            return Visible(tuple(text), 0, end)
        return Visible(self._release(everything=end is not None), 0, end)

    def finish(self) -> Visible:
        """The end of an output that is whole though nothing ended it: what is held becomes
        visible."""
        end = End("stop", self.generated_tokens)
        return Visible(self._release(everything=True), 0, end)

    def _through_budget(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[: self._max_tokens - self.generated_tokens]

    def _first_ender(self, tokens: Sequence[int]) -> int:
        """Place of the first EOS or stop token; -1 = none."""
        if self._enders.isdisjoint(tokens):
            return -1
        return next(place for place, token in enumerate(tokens) if token in self._enders)

    def _plain_end(self, ender: int | None) -> End | None:
        """The end by a token or by the budget, after `generated_tokens` tokens of text."""
        if ender is not None:
            self.generated_tokens += 1
            reason = None if ender in self._eos_ids else ender
            return End("stop", self.generated_tokens, reason, ender)
        if self.generated_tokens == self._max_tokens:
            return End("length", self.generated_tokens)
        return None

    def _match(self, tokens: Sequence[int], generated_before: int) -> Visible | None:
        """Append `tokens` to the held ones and end the output if a stop is complete."""
        start, held_before = self._total_bytes, len(self._held)
        chunk = self._append(tokens)
        early = max(0, min(self._min_tokens - generated_before, len(tokens)))
        ignored = sum(len(self._token_bytes[token]) for token in tokens[:early]) if early else 0
        string, string_bytes = _first_match(self._patterns, chunk, ignored)
        sequence, sequence_tokens = _first_match(self._sequences, tokens, early)
        if string is None and sequence is None:
            return None
        stop_end = start + string_bytes
        places = enumerate(self._held[held_before:], start=held_before)
        ending = next((place for place, held in places if held.end >= stop_end), -1)
        if sequence is not None:
            last = held_before + sequence_tokens - 1
            if string is None or last < ending:
                return self._end_by_sequence(sequence, last, generated_before + sequence_tokens)
        assert string is not None
        visible_end = stop_end if self._include_stop else stop_end - len(string.text)
        self.generated_tokens = generated_before + ending + 1 - held_before
        visible, trim_bytes = self._cut(ending, visible_end)
        reason = bytes(string.text).decode(errors="replace")
        return Visible(visible, trim_bytes, End("stop", self.generated_tokens, reason))

    def _end_by_sequence(self, sequence: _Pattern, last: int, generated: int) -> Visible:
        """The end by a sequence whose last token is held number `last`; all of it is held."""
        self.generated_tokens = generated
        end = last + 1 if self._include_stop else last + 1 - len(sequence.text)
        visible = tuple(held.token for held in self._held[:end])
        return Visible(visible, 0, End("stop", generated, tuple(sequence.text)))

    def _append(self, tokens: Sequence[int]) -> bytes:
        pieces = []
        for token in tokens:
            piece = self._token_bytes[token]
            end = self._total_bytes + len(piece)
            self._held.append(_Held(token, self._total_bytes, end))
            self._total_bytes = end
            pieces.append(piece)
        return b"".join(pieces)

    def _cut(self, ending: int, visible_end: int) -> tuple[tuple[int, ...], int]:
        """Held tokens through number `ending` that show something before `visible_end`.

        A token without bytes that stands before the cut was visible in a narrower round, hence it
        is visible here.
        """
        visible = []
        for held in self._held[: ending + 1]:
            if held.start < held.end and held.start >= visible_end:
                break
            visible.append(held.token)
            if held.end > visible_end:
                return tuple(visible), held.end - visible_end
        return tuple(visible), 0

    def _release(self, *, everything: bool) -> tuple[int, ...]:
        """Hand out tokens in order, up to the first that may be part of a stop string."""
        count = len(self._held)
        if not everything:
            matched = max((pattern.matched for pattern in self._patterns), default=0)
            clear = self._total_bytes - matched
            begun = max((pattern.matched for pattern in self._sequences), default=0)
            count = next(
                (place for place, held in enumerate(self._held) if held.end > clear), count
            )
            count = min(count, len(self._held) - begun)
        released = tuple(held.token for held in self._held[:count])
        del self._held[:count]
        return released

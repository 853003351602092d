"""Log-probabilities of visible tokens in the two shapes OpenAI defines (contract: K4).

They are the model's own, before penalties, bias, temperature and filters. A token whose probability
is zero in float32 is given FLOOR, since JSON has no infinity (known fault H-11). Entries wait until
their chunk is sent: a token may show no text yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare_ray.contracts.messages import Delta
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.responses import (
    Alternative,
    ChatLogprobs,
    TextLogprobs,
    TokenLogprob,
)

FLOOR = -9999.0


class ScoredTokens:
    """Tokens of one choice, and how far their scores have been handed out.

    Args:
        token_bytes: bytes by token id.
        wanted: the request asked for log-probabilities.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, wanted: bool) -> None:
        self._table = token_bytes
        self._wanted = wanted
        self._tokens: list[tuple[int, TokenScore]] = []
        self.rewind()

    def rewind(self) -> None:
        """Hand everything out again, for an answer in one piece."""
        self._taken = 0
        self._offset = 0
        self._text = IncrementalDetokenizer(self._table)

    def add(self, delta: Delta) -> None:
        """Newly visible tokens."""
        if self._wanted:
            self._tokens += zip(delta.tokens, delta.scores, strict=True)

    def chat(self) -> ChatLogprobs | None:
        """What was not handed out yet, in the shape of a chat; None where nothing was asked for."""
        if not self._wanted:
            return None
        content = [
            TokenLogprob(
                self._spelling(token),
                _finite(score.logprob),
                list(self._bytes(token)),
                [
                    Alternative(self._spelling(other), _finite(logprob), list(self._bytes(other)))
                    for other, logprob in zip(score.top_ids, score.top_logprobs, strict=True)
                ],
            )
            for token, score in self._take()
        ]
        return ChatLogprobs(content)

    def text(self) -> TextLogprobs | None:
        """What was not handed out yet, in the shape of a text completion."""
        if not self._wanted:
            return None
        found = TextLogprobs([], [], [], [])
        for token, score in self._take():
            text = self._spelling(token)
            found.tokens.append(text)
            found.token_logprobs.append(_finite(score.logprob))
            best: dict[str, float] = {}
            for other, logprob in zip(score.top_ids, score.top_logprobs, strict=True):
                best.setdefault(self._spelling(other), _finite(logprob))
            if best:
                best.setdefault(text, _finite(score.logprob))
            found.top_logprobs.append(best)
            found.text_offset.append(self._offset)
            self._offset += len(self._text.push((token,)))
        return found

    def _take(self) -> list[tuple[int, TokenScore]]:
        first, self._taken = self._taken, len(self._tokens)
        return self._tokens[first:]

    def _bytes(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _spelling(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)

"""Log-probabilities of visible tokens in the two shapes OpenAI defines (contract: K4).

They are the model's own, or those of the distribution drawn from, as the deployment says. A token
whose probability is zero in float32 is given FLOOR, since JSON has no infinity (known fault H-11).
Entries wait until their chunk is sent: a token may show no text yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.responses import (
    Alternative,
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprob,
)

FLOOR = -9999.0


class ScoredTokens:
    """Tokens of one choice, and how far their scores have been handed out.

    Args:
        token_bytes: bytes by token id.
        wanted: the request asked for log-probabilities.

    Attributes:
        wanted: as given.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, wanted: bool) -> None:
        self._table = token_bytes
        self.wanted = wanted
        self._tokens: list[tuple[int, TokenScore | None]] = []
        self.rewind()

    def rewind(self) -> None:
        """Hand everything out again, for an answer in one piece."""
        self._taken = 0
        self._offset = 0
        self._text = IncrementalDetokenizer(self._table)

    def add(self, delta: Delta) -> None:
        """Newly visible tokens."""
        if self.wanted:
            self._tokens += zip(delta.tokens, delta.scores, strict=True)

    def echo(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """The prompt as the first part of the output; its first token has no score."""
        if self.wanted:
            self._tokens += zip(tokens, (None, *scores), strict=True)

    def ended(self, finished: Finished) -> None:
        """The token that ended the output, which is no part of its text."""
        if self.wanted and finished.ender_score is not None:
            self._tokens.append((finished.ender, finished.ender_score))

    def chat(self) -> ChatLogprobs | None:
        """What was not handed out yet, in the shape of a chat; None where nothing was asked for."""
        if not self.wanted:
            return None
        taken = self._take()
        return ChatLogprobs([self.entry(t, score) for t, score in taken if score is not None])

    def entry(self, token: int, score: TokenScore) -> TokenLogprob:
        """One token in the shape of a chat."""
        return TokenLogprob(
            self._spelling(token),
            _finite(score.logprob),
            list(self._bytes(token)),
            [
                Alternative(self._spelling(other), _finite(logprob), list(self._bytes(other)))
                for other, logprob in zip(score.top_ids, score.top_logprobs, strict=True)
            ],
        )

    def at(self, places: Iterable[int]) -> list[TokenLogprob]:
        """The tokens of these places, counted from the output's first, in the shape of a chat."""
        taken = (self._tokens[place] for place in places)
        return [self.entry(token, score) for token, score in taken if score is not None]

    def text(self) -> TextLogprobs | None:
        """What was not handed out yet, in the shape of a text completion."""
        if not self.wanted:
            return None
        found = TextLogprobs([], [], [], [])
        for token, score in self._take():
            text = self._spelling(token)
            found.tokens.append(text)
            found.token_logprobs.append(None if score is None else _finite(score.logprob))
            found.top_logprobs.append(None if score is None else self._best(text, score))
            found.text_offset.append(self._offset)
            self._offset += len(self._text.push((token,)))
        return found

    def _best(self, text: str, score: TokenScore) -> dict[str, float]:
        best: dict[str, float] = {}
        for other, logprob in zip(score.top_ids, score.top_logprobs, strict=True):
            best.setdefault(self._spelling(other), _finite(logprob))
        if best:
            best.setdefault(text, _finite(score.logprob))
        return best

    def _take(self) -> list[tuple[int, TokenScore | None]]:
        first, self._taken = self._taken, len(self._tokens)
        return self._tokens[first:]

    def _bytes(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _spelling(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


def prompt_logprobs(
    table: Sequence[bytes], tokens: Sequence[int], scores: Sequence[TokenScore], count: int
) -> list[PromptLogprobs | None]:
    """One entry per prompt token, null for the first, which has no prediction.

    Args:
        table: bytes by token id.
        count: alternatives asked for; `scores` may hold more.
    """
    entries: list[PromptLogprobs | None] = [None]
    for token, score in zip(tokens[1:], scores, strict=True):
        entry: PromptLogprobs = {}
        best = zip(score.top_ids[:count], score.top_logprobs, strict=False)
        for rank, (other, logprob) in enumerate(best, start=1):
            entry[str(other)] = _described(table, other, logprob, rank)
        entry.setdefault(str(token), _described(table, token, score.logprob, None))
        entries.append(entry)
    return entries


def _described(
    table: Sequence[bytes], token: int, logprob: float, rank: int | None
) -> PromptLogprob:
    text = table[token] if token < len(table) else b""
    return PromptLogprob(_finite(logprob), rank, text.decode(errors="replace"))


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)

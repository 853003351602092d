"""Which source, or token, every piece of an answer's text came from.

Tokens become text in a detokeniser, which holds back halves of characters, and the text becomes
reasoning and content in a parser, which holds back what may become a tag and leaves out tags, calls
and layout. A trail follows each character through both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from flare_ray.contracts.messages import Delta, TokenSource
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.responses import SourceName, SourceSpan

SOURCE_NAMES: dict[int, SourceName] = {
    TokenSource.TARGET: "target",
    TokenSource.DRAFTER: "drafter",
    TokenSource.OWN_TEXT: "own_text",
    TokenSource.HISTORY: "history",
    TokenSource.PREDICTION: "prediction",
    TokenSource.GRAMMAR: "grammar",
}


Label = TypeVar("Label")


class Trail(Generic[Label]):
    """Labels of the characters between the tokens of one output and the texts that show them."""

    def __init__(self) -> None:
        self._fed: deque[tuple[int, Label]] = deque()
        self._fed_end = 0
        self._shown: deque[tuple[int, Label]] = deque()

    def feed(self, characters: int, label: Label) -> None:
        """The text goes on with so many characters of one label."""
        if characters:
            self._fed_end += characters
            self._fed.append((self._fed_end, label))

    def show(self, places: Iterable[tuple[int, int]]) -> None:
        """Characters of these places in the text are shown next: (first, behind the last), rising;
        what lies before the last of them is never shown later."""
        for start, end in places:
            at = start
            while at < end:
                run_end, label = self._fed[0]
                if run_end > at:
                    step = min(run_end, end) - at
                    self._shown.append((step, label))
                    at += step
                if run_end <= at:
                    self._fed.popleft()

    def runs(self, text: str) -> Iterator[tuple[Label, str]]:
        """Labelled parts that add up to `text`, which consists of the next characters shown."""
        at = 0
        while at < len(text):
            run, label = self._shown.popleft()
            step = min(run, len(text) - at)
            yield label, text[at : at + step]
            at += step
            if step < run:
                self._shown.appendleft((run - step, label))


class SourceTrail(Trail[SourceName]):
    """Sources of the characters."""

    def take(self, text: str) -> list[SourceSpan]:
        """Spans that add up to `text`, which consists of the next characters shown."""
        spans: list[SourceSpan] = []
        for source, part in self.runs(text):
            append_span(spans, source, part)
        return spans


class TokenTrail(Trail[int]):
    """Places of tokens in the output. A token that completes no character belongs to the one that
    does."""

    def __init__(self) -> None:
        super().__init__()
        self._silent: list[int] = []
        self._members: dict[int, list[int]] = {}

    def feed(self, characters: int, label: int) -> None:
        """As `Trail.feed`; to be called for every token, also those that add no character."""
        super().feed(characters, label)
        if not characters:
            self._silent.append(label)
        elif label not in self._members:
            self._members[label] = [*(n for n in self._silent if n != label), label]
            self._silent = []

    def take(self, text: str) -> list[int]:
        """Tokens that begin to be shown with `text`, which consists of the next characters shown;
        each is told once."""
        places: list[int] = []
        for label, _ in self.runs(text):
            places += self._members.get(label, ())
            # What came before and was not shown, tags and calls, never will be.
            for passed in [known for known in self._members if known < label]:
                del self._members[passed]
            if label in self._members:
                self._members[label] = []
        return places


class SourcedText:
    """Plain text of one output: tokens in, whole characters out, and their spans if wanted.

    Args:
        token_bytes: bytes by token id.
        traced: keep spans.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, traced: bool) -> None:
        self.traced = traced
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._spans: list[SourceSpan] = []
        self._last: SourceName = "target"

    def echo(self, text: str) -> None:
        """The prompt's own text stands in front."""
        append_span(self._spans, "prompt", text)

    def push(self, delta: Delta) -> str:
        """Text that became complete."""
        if not self.traced:
            return self._detokenizer.push(delta.tokens, trim_bytes=delta.trim_bytes)
        pieces = []
        last = len(delta.tokens) - 1
        for place, (token, source) in enumerate(zip(delta.tokens, delta.sources, strict=True)):
            trim_bytes = delta.trim_bytes if place == last else 0
            self._last = SOURCE_NAMES[source]
            pieces.append(self._detokenizer.push((token,), trim_bytes=trim_bytes))
            append_span(self._spans, self._last, pieces[-1])
        return "".join(pieces)

    def finish(self) -> str:
        """What is left of a character that never became whole."""
        text = self._detokenizer.finish()
        append_span(self._spans, self._last, text)
        return text

    def take(self) -> list[SourceSpan]:
        """Spans of the text since the last call."""
        spans, self._spans = self._spans, []
        return spans


def joined(spans: Iterable[SourceSpan]) -> list[SourceSpan]:
    """The same text in the fewest spans."""
    found: list[SourceSpan] = []
    for span in spans:
        append_span(found, span.source, span.text)
    return found


def append_span(spans: list[SourceSpan], source: SourceName, text: str) -> None:
    """Append, joining neighbouring text of one source; empty text is dropped."""
    if not text:
        return
    if spans and spans[-1].source == source:
        spans[-1] = SourceSpan(source, spans[-1].text + text)
    else:
        spans.append(SourceSpan(source, text))

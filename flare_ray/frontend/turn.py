"""One chat answer: tokens in, reasoning, content and calls out. Every chat API writes from this."""

from __future__ import annotations

from flare_ray.contracts.messages import Delta, TokenSource
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.parsers import ChatEvent, ChatParser
from flare_ray.frontend.parsers.events import append_event
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sources import SOURCE_NAMES, SourceTrail, TokenTrail


class Turn:
    """An answer under construction; calls come in parts if it is streamed.

    Attributes:
        reasoning_tokens: tokens of reasoning so far, its closing tag included.
        trail: gives the sources of the texts in events, in order; None = nobody asked for them.
        token_trail: gives the places of their tokens in the output; None likewise.

    Args:
        by_token: follow tokens to the texts that show them.
    """

    def __init__(
        self, settings: ApiSettings, prepared: Prepared, *, by_token: bool = False
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(settings.codec.token_bytes)
        self._parser = ChatParser(
            settings.chat,
            tools=prepared.tools,
            inside_reasoning=prepared.inside_reasoning,
            data_answer=prepared.data_answer,
            in_parts=prepared.stream,
            traced=prepared.token_sources or by_token,
        )
        self.trail = SourceTrail() if prepared.token_sources else None
        self.token_trail = TokenTrail() if by_token else None
        self._traced = prepared.token_sources or by_token
        self._last_token = -1
        self._last_source = int(TokenSource.TARGET)
        self.reasoning_tokens = 0
        self._undecided_tokens = 0

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._parser.num_calls

    def add(self, delta: Delta) -> list[ChatEvent]:
        """What newly visible tokens complete; empty while text is held back."""
        if not self._traced and self._parser.outside_reasoning:
            text = self._detokenizer.push(delta.tokens, trim_bytes=delta.trim_bytes)
            return self._parser.feed(text) if text else []
        # One by one: a delta may leave reasoning in its middle, tokens are billed by kind, and each
        # has a source of its own.
        events: list[ChatEvent] = []
        last = len(delta.tokens) - 1
        for i, token in enumerate(delta.tokens):
            self.reasoning_tokens += self._parser.in_reasoning
            self._undecided_tokens += self._parser.undecided
            self._last_token += 1
            if self.trail is not None:
                self._last_source = delta.sources[i]
            for event in self._push((token,), delta.trim_bytes if i == last else 0):
                append_event(events, event)
            if not self._parser.undecided:
                if self._parser.in_reasoning:
                    self.reasoning_tokens += self._undecided_tokens
                self._undecided_tokens = 0
        return events

    def end(self) -> list[ChatEvent]:
        """What was held back until the answer's end."""
        if self._parser.undecided:
            self.reasoning_tokens += self._undecided_tokens
        text = self._detokenizer.finish()
        events = self._feed(text) if text else []
        for event in self._parser.finish():
            append_event(events, event)
        self._show()
        return events

    def _push(self, tokens: tuple[int, ...], trim_bytes: int) -> list[ChatEvent]:
        text = self._detokenizer.push(tokens, trim_bytes=trim_bytes)
        if not text and self.token_trail is not None:
            self.token_trail.feed(0, self._last_token)
        return self._feed(text) if text else []

    def _feed(self, text: str) -> list[ChatEvent]:
        if self.trail is not None:
            self.trail.feed(len(text), SOURCE_NAMES[self._last_source])
        if self.token_trail is not None:
            self.token_trail.feed(len(text), self._last_token)
        events = self._parser.feed(text)
        self._show()
        return events

    def _show(self) -> None:
        """Tell the trails what the parser handed out."""
        if not self._traced:
            return
        places = self._parser.take_shown()
        for trail in (self.trail, self.token_trail):
            if trail is not None:
                trail.show(places)

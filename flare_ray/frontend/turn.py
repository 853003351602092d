"""One chat answer: tokens in, reasoning, content and calls out. Every chat API writes from this."""

from __future__ import annotations

from flare_ray.contracts.messages import Delta
from flare_ray.frontend.detokenize import IncrementalDetokenizer
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.parsers import ChatEvent, ChatParser
from flare_ray.frontend.parsers.events import append_event
from flare_ray.frontend.settings import ApiSettings


class Turn:
    """An answer under construction; calls come in parts if it is streamed.

    Attributes:
        reasoning_tokens: tokens of reasoning so far, its closing tag included.
    """

    def __init__(self, settings: ApiSettings, prepared: Prepared) -> None:
        self._detokenizer = IncrementalDetokenizer(settings.codec.token_bytes)
        self._parser = ChatParser(
            settings.chat,
            tools=prepared.tools,
            inside_reasoning=prepared.inside_reasoning,
            data_answer=prepared.data_answer,
            in_parts=prepared.stream,
        )
        self.reasoning_tokens = 0
        self._undecided_tokens = 0

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._parser.num_calls

    def add(self, delta: Delta) -> list[ChatEvent]:
        """What newly visible tokens complete; empty while text is held back."""
        if not self._parser.in_reasoning and not self._parser.undecided:
            return self._push(delta.tokens, delta.trim_bytes)
        # One by one: a delta may leave reasoning in its middle, and tokens are billed by kind.
        events: list[ChatEvent] = []
        last = len(delta.tokens) - 1
        for i, token in enumerate(delta.tokens):
            self.reasoning_tokens += self._parser.in_reasoning
            self._undecided_tokens += self._parser.undecided
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
        events = self._parser.feed(self._detokenizer.finish())
        for event in self._parser.finish():
            append_event(events, event)
        return events

    def _push(self, tokens: tuple[int, ...], trim_bytes: int) -> list[ChatEvent]:
        text = self._detokenizer.push(tokens, trim_bytes=trim_bytes)
        return self._parser.feed(text) if text else []

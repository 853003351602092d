"""One choice of an answer: output items in, chunks or the whole choice out.

Nearly every chunk of a stream differs from the one before it in a text alone. Such a chunk is not
encoded but put together, from the bytes around that text (`TextFrame`). `frames` of a choice
chooses: every other chunk is encoded as a record, and both ways write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.openai.logprobs import ScoredTokens
from flare_ray.frontend.openai.prepare import Echo
from flare_ray.frontend.openai.responses import (
    ArgumentsPart,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChatSources,
    ChunkChoice,
    FunctionCall,
    SourceSpan,
    TextChoice,
    TextFrame,
    ToolCallBody,
    ToolCallPart,
)
from flare_ray.frontend.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCall,
)
from flare_ray.frontend.sources import SourcedText, joined
from flare_ray.frontend.turn import Turn

Encode = Callable[[Sequence[ChunkChoice | TextChoice]], bytes]
"""Chunks as server-sent events of their response."""
_TEXTS = (ContentText, ReasoningText)
_Shown = ReasoningText | ContentText | ToolCall | CallStart | CallArguments
"""Events that a chunk tells of: the end of a call is told by what follows it."""


class Choice(Protocol):
    """One choice under construction: text in, chunks or a whole choice out."""

    def add(self, delta: Delta) -> list[ChunkChoice] | list[TextChoice]:
        """Chunks for newly visible output; may be empty while text is held back."""

    def frames(self, delta: Delta) -> bytes:
        """The same as server-sent events. What was shown so is not part of `whole`."""

    def end(self, finished: Finished) -> list[ChunkChoice] | list[TextChoice]:
        """Remaining chunks; the last one carries the finish reason."""

    def whole(self, finished: Finished) -> ChatChoice | TextChoice:
        """The choice in one piece."""


class TextChoiceBuilder:
    """A choice of /v1/completions: plain text, tags of the chat format included.

    Args:
        echo: the prompt that the text begins with.
        discards: what is generated is left out.
    """

    def __init__(
        self,
        index: int,
        text: SourcedText,
        scored: ScoredTokens,
        encode: Encode,
        *,
        echo: Echo | None = None,
        discards: bool = False,
    ) -> None:
        self._index = index
        self._text = text
        self._scored = scored
        self._encode = encode
        self._frame: TextFrame | None = None
        self._echo = echo
        # Scorers of texts count on one entry for every token that was asked for.
        self._tells_ender = echo is not None and not discards
        self._discards = discards
        self._pieces: list[str] = []
        self._spans: list[SourceSpan] = []

    def add(self, delta: Delta) -> list[TextChoice]:
        """See `Choice.add`."""
        text = self._opening(delta.prompt_scores)
        if not self._discards:
            self._scored.add(delta)
            text += self._text.push(delta)
        self._pieces.append(text)
        if not text:
            return []
        return [
            TextChoice(
                index=self._index,
                text=text,
                logprobs=self._scored.text(),
                token_sources=self._sources(),
            )
        ]

    def frames(self, delta: Delta) -> bytes:
        """See `Choice.frames`. Text alone: no scores, no sources, no echo before it, not left
        out."""
        if self._scored.wanted or self._text.traced or self._echo or self._discards:
            return self._encode(self.add(delta))
        text = self._text.push(delta)
        if not text:
            return b""
        if self._frame is None:
            self._frame = TextFrame(self._encode([TextChoice(index=self._index, text="")]), "text")
        return self._frame.around(text)

    def end(self, finished: Finished) -> list[TextChoice]:
        """See `Choice.end`."""
        text = self._opening(()) + self._text.finish()
        self._pieces.append(text)
        if self._tells_ender:
            self._scored.ended(finished)
        return [
            TextChoice(
                index=self._index,
                text=text,
                logprobs=self._scored.text(),
                finish_reason=finished.reason,
                stop_reason=finished.stop_reason,
                token_sources=self._sources(),
            )
        ]

    def whole(self, finished: Finished) -> TextChoice:
        """See `Choice.whole`."""
        self.end(finished)
        self._scored.rewind()
        return TextChoice(
            index=self._index,
            text="".join(self._pieces),
            logprobs=self._scored.text(),
            finish_reason=finished.reason,
            stop_reason=finished.stop_reason,
            token_sources=joined(self._spans) if self._text.traced else msgspec.UNSET,
        )

    def _sources(self) -> list[SourceSpan] | msgspec.UnsetType:
        """Spans of the text since the last call."""
        if not self._text.traced:
            return msgspec.UNSET
        spans = self._text.take()
        self._spans += spans
        return spans

    def _opening(self, scores: Sequence[TokenScore]) -> str:
        """The echoed prompt, once; its scores come before anything else."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ""
        self._scored.echo(echo.tokens, scores)
        self._text.echo(echo.text)
        return echo.text


class ChatChoiceBuilder:
    """A choice of /v1/chat/completions: reasoning, content and tool calls told apart."""

    def __init__(
        self,
        index: int,
        turn: Turn,
        scored: ScoredTokens,
        encode: Encode,
        *,
        call_prefix: str,
    ) -> None:
        self._index = index
        self._turn = turn
        self._scored = scored
        self._encode = encode
        self._frames: dict[type[ChatEvent], TextFrame] = {}
        self._call_prefix = call_prefix
        self._opened = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._sources: dict[str, list[SourceSpan]] = {}
        self._calls: list[ToolCallBody] = []

    def add(self, delta: Delta) -> list[ChunkChoice]:
        """See `Choice.add`."""
        self._scored.add(delta)
        return self._scored_chunks(self._chunks(self._turn.add(delta)))

    def frames(self, delta: Delta) -> bytes:
        """See `Choice.frames`. Text alone: one piece of content or reasoning, not the first chunk,
        no scores, no sources."""
        if self._scored.wanted or self._turn.trail is not None:
            return self._encode(self.add(delta))
        events = self._turn.add(delta)
        if len(events) == 1 and self._opened:
            event = events[0]
            if isinstance(event, _TEXTS):
                frame = self._frames.get(type(event)) or self._text_frame(event)
                return frame.around(event.text)
        return self._encode(self._chunks(events))

    def _text_frame(self, event: ContentText | ReasoningText) -> TextFrame:
        """The frame of chunks that carry such a piece and nothing else."""
        if isinstance(event, ContentText):
            name, delta = "content", ChatDelta(content="")
        else:
            name, delta = "reasoning_content", ChatDelta(reasoning_content="")
        frame = TextFrame(self._encode([ChunkChoice(index=self._index, delta=delta)]), name)
        self._frames[type(event)] = frame
        return frame

    def end(self, finished: Finished) -> list[ChunkChoice]:
        """See `Choice.end`."""
        chunks = self._chunks(self._turn.end())
        last = ChunkChoice(
            index=self._index,
            delta=ChatDelta() if self._opened else self._opening(ChatDelta(content="")),
            finish_reason=self._finish_reason(finished),
            stop_reason=msgspec.UNSET if finished.stop_reason is None else finished.stop_reason,
        )
        return self._scored_chunks([*chunks, last])

    def whole(self, finished: Finished) -> ChatChoice:
        """See `Choice.whole`."""
        self.end(finished)
        self._scored.rewind()
        content = "".join(self._content)
        calls = [msgspec.structs.replace(call, index=msgspec.UNSET) for call in self._calls]
        message = ChatMessage(
            content=content if content or not calls else None,
            reasoning_content="".join(self._reasoning) or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        return ChatChoice(
            index=self._index,
            message=message,
            logprobs=self._scored.chat(),
            finish_reason=self._finish_reason(finished),
            stop_reason=finished.stop_reason,
            token_sources=self._all_sources(),
        )

    def _scored_chunks(self, chunks: list[ChunkChoice]) -> list[ChunkChoice]:
        """The first chunk carries the scores of every token since the last one that did."""
        scores = self._scored.chat() if chunks else None
        if scores is not None:
            chunks[0] = msgspec.structs.replace(chunks[0], logprobs=scores)
        return chunks

    def _finish_reason(self, finished: Finished) -> str:
        calls = self._turn.num_calls > 0 and finished.reason == "stop"
        return "tool_calls" if calls else finished.reason

    def _chunks(self, events: Sequence[ChatEvent]) -> list[ChunkChoice]:
        return [
            ChunkChoice(
                index=self._index,
                delta=self._opening(self._delta(event)),
                token_sources=self._event_sources(event),
            )
            for event in events
            if not isinstance(event, CallEnd)
        ]

    def _event_sources(self, event: _Shown) -> ChatSources | msgspec.UnsetType:
        """Spans of a piece of reasoning or content; each of them once, in order."""
        trail = self._turn.trail
        if trail is None or not isinstance(event, ContentText | ReasoningText):
            return msgspec.UNSET
        name = "content" if isinstance(event, ContentText) else "reasoning_content"
        spans = trail.take(event.text)
        self._sources.setdefault(name, []).extend(spans)
        return ChatSources(**{name: spans})

    def _all_sources(self) -> ChatSources | msgspec.UnsetType:
        if self._turn.trail is None:
            return msgspec.UNSET
        return ChatSources(**{name: joined(spans) for name, spans in self._sources.items()})

    def _opening(self, delta: ChatDelta) -> ChatDelta:
        if self._opened:
            return delta
        self._opened = True
        return msgspec.structs.replace(delta, role="assistant")

    def _delta(self, event: _Shown) -> ChatDelta:
        if isinstance(event, ContentText):
            self._content.append(event.text)
            return ChatDelta(content=event.text)
        if isinstance(event, ReasoningText):
            self._reasoning.append(event.text)
            return ChatDelta(reasoning_content=event.text)
        if isinstance(event, CallArguments):
            part = ToolCallPart(index=event.index, function=ArgumentsPart(event.text))
            return ChatDelta(tool_calls=[part])
        call = ToolCallBody(
            index=event.index,
            id=f"{self._call_prefix}_{event.index}",
            type="function",
            function=FunctionCall(
                event.name, event.arguments if isinstance(event, ToolCall) else ""
            ),
        )
        self._calls.append(call)
        return ChatDelta(tool_calls=[call])

"""From output items to responses: whole bodies, or server-sent frames.

Stages of a stream: 1. the first chunk of a choice carries its role; 2. one chunk per event;
3. exactly one finish chunk per choice and nothing for it afterwards (known fault H-15); 4. the
usage chunk if asked for, exactly one (H-05); 5. [DONE]. A failure replaces what is left by one
error event and [DONE].
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.client import RequestStream, StreamEvent
from flare_ray.frontend.openai.errors import ErrorBody, failed_detail
from flare_ray.frontend.openai.logprobs import ScoredTokens, prompt_logprobs
from flare_ray.frontend.openai.prepare import Echo, Prepared
from flare_ray.frontend.openai.responses import (
    DONE_FRAME,
    ArgumentsPart,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChatSources,
    ChunkChoice,
    CompletionTokensDetails,
    Envelope,
    FunctionCall,
    PromptTokensDetails,
    SourceSpan,
    TextChoice,
    ToolCallBody,
    ToolCallPart,
    Usage,
    frame,
)
from flare_ray.frontend.openai.responses import encode as encode_body
from flare_ray.frontend.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCall,
)
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sources import SourcedText, joined
from flare_ray.frontend.stream import failure_error
from flare_ray.frontend.turn import Turn

_Shown = ReasoningText | ContentText | ToolCall | CallStart | CallArguments
"""Events that a chunk tells of: the end of a call is told by what follows it."""


class Choice(Protocol):
    """One choice under construction: text in, chunks or a whole choice out."""

    def add(self, delta: Delta) -> list[ChunkChoice] | list[TextChoice]:
        """Chunks for newly visible output; may be empty while text is held back."""

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
        *,
        echo: Echo | None = None,
        discards: bool = False,
    ) -> None:
        self._index = index
        self._text = text
        self._scored = scored
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
        *,
        call_prefix: str,
    ) -> None:
        self._index = index
        self._turn = turn
        self._scored = scored
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


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Names of one endpoint's bodies."""

    whole_object: str
    chunk_object: str
    chat: bool


CHAT = AnswerFormat("chat.completion", "chat.completion.chunk", chat=True)
COMPLETION = AnswerFormat("text_completion", "text_completion", chat=False)


class Answer:
    """The response to one prepared request."""

    def __init__(self, settings: ApiSettings, prepared: Prepared, style: AnswerFormat) -> None:
        self._settings = settings
        self._prepared = prepared
        self._style = style
        self._created = int(time.time())
        self._finished: dict[int, Finished] = {}
        self._turns: dict[int, Turn] = {}
        self._prompt_scores: dict[int, Sequence[TokenScore]] = {}
        self._choices = [self._choice(i) for i in range(len(prepared.prompt_tokens))]

    async def whole(self, streams: Sequence[RequestStream]) -> bytes:
        """The JSON body once every choice has ended.

        Raises:
            FlareError: a choice failed.
        """
        async for index, event in self._events(streams):
            if isinstance(event, Delta):
                self._choices[index].add(event)
                if event.prompt_scores:
                    self._prompt_scores[index] = event.prompt_scores
            elif isinstance(event, Failed):
                raise failure_error(event)
            else:
                self._finished[index] = self._counted(event)
        choices = [self._scored_choice(i) for i in range(len(self._choices))]
        return encode_body(self._envelope(self._style.whole_object, choices, usage=self._usage()))

    async def frames(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """Server-sent frames; those that are ready together come out as one piece."""
        usage = None if self._prepared.include_usage else msgspec.UNSET
        async for index, event in self._events(streams):
            if isinstance(event, Failed):
                yield _event(ErrorBody(failed_detail(event))) + DONE_FRAME
                return
            if isinstance(event, Delta):
                chunks = self._choices[index].add(event)
            else:
                finished = self._finished[index] = self._counted(event)
                chunks = self._choices[index].end(finished)
            if chunks:
                yield b"".join(
                    frame(self._envelope(self._style.chunk_object, [chunk], usage=usage))
                    for chunk in chunks
                )
        last = DONE_FRAME
        if self._prepared.include_usage:
            envelope = self._envelope(self._style.chunk_object, [], usage=self._usage())
            last = frame(envelope) + last
        yield last

    def _counted(self, finished: Finished) -> Finished:
        """What was generated for a prompt's sake alone is neither shown nor billed."""
        if not self._prepared.discards:
            return finished
        return msgspec.structs.replace(
            finished, reason="length", completion_tokens=0, stop_reason=None
        )

    def _scored_choice(self, index: int) -> ChatChoice | TextChoice:
        """A whole choice, with its prompt's log-probabilities where they were asked for by name."""
        choice = self._choices[index].whole(self._finished[index])
        count = self._prepared.prompt_logprobs
        if count < 0:
            return choice
        entries = prompt_logprobs(
            self._settings.codec.token_bytes,
            self._prepared.requests[index].prompt_tokens,
            self._prompt_scores.get(index, ()),
            count,
        )
        return msgspec.structs.replace(choice, prompt_logprobs=entries)

    async def _events(
        self, streams: Sequence[RequestStream]
    ) -> AsyncIterator[tuple[int, StreamEvent]]:
        if not streams:  # max_tokens 0
            for index, count in enumerate(self._prepared.prompt_tokens):
                yield index, Finished(self._prepared.response_id, "length", count, 0)
        elif len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
        else:
            async for pair in merged(streams):
                yield pair

    def _choice(self, index: int) -> Choice:
        token_bytes = self._settings.codec.token_bytes
        scored = ScoredTokens(token_bytes, wanted=self._prepared.logprobs)
        if not self._style.chat:
            echoes = self._prepared.echoes
            return TextChoiceBuilder(
                index,
                SourcedText(token_bytes, traced=self._prepared.token_sources),
                scored,
                echo=echoes[index] if echoes else None,
                discards=self._prepared.discards,
            )
        turn = self._turns[index] = Turn(self._settings, self._prepared)
        prefix = f"call_{self._prepared.response_id.removeprefix('chatcmpl-')}"
        return ChatChoiceBuilder(index, turn, scored, call_prefix=prefix)

    def _usage(self) -> Usage:
        prompt = sum(self._prepared.prompt_tokens[:: self._prepared.choices_per_prompt])
        ended = self._finished.values()
        reasoning = sum(turn.reasoning_tokens for turn in self._turns.values())
        predicted = any(request.prediction for request in self._prepared.requests)
        return usage_of(prompt, ended, reasoning_tokens=reasoning, predicted=predicted)

    def _envelope(
        self,
        kind: str,
        choices: Sequence[ChunkChoice | ChatChoice | TextChoice],
        *,
        usage: Usage | msgspec.UnsetType | None,
    ) -> Envelope:
        return Envelope(
            id=self._prepared.response_id,
            object=kind,
            created=self._created,
            model=self._settings.model_name,
            choices=list(choices),
            usage=usage,
        )


def usage_of(
    prompt: int, ended: Iterable[Finished], *, reasoning_tokens: int, predicted: bool = False
) -> Usage:
    """Token counts of choices that share one prompt of `prompt` tokens.

    Args:
        predicted: the request brought a prediction: its own tokens are counted, not every draft.
    """
    ended = tuple(ended)
    completion = sum(f.completion_tokens for f in ended)
    offered = sum(f.predicted_offered if predicted else f.drafts_offered for f in ended)
    accepted = sum(f.predicted_accepted if predicted else f.drafts_accepted for f in ended)
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(sum(f.cached_tokens for f in ended)),
        CompletionTokensDetails(reasoning_tokens, accepted, offered - accepted),
    )


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Events of several streams with their index, as they come; ends when all have ended."""
    queue: asyncio.Queue[tuple[int, StreamEvent | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                queue.put_nowait((index, event))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, event = await queue.get()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()


def _event(value: msgspec.Struct) -> bytes:
    return b"data: " + encode_body(value) + b"\n\n"

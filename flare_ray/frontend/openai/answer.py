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
from functools import partial

import msgspec

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.client import RequestStream, StreamEvent
from flare_ray.frontend.openai.choices import ChatChoiceBuilder, Choice, TextChoiceBuilder
from flare_ray.frontend.openai.errors import ErrorBody, failed_detail
from flare_ray.frontend.openai.logprobs import ScoredTokens, prompt_logprobs
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.openai.responses import (
    DONE_FRAME,
    ChatChoice,
    ChunkChoice,
    CompletionTokensDetails,
    Envelope,
    PromptTokensDetails,
    TextChoice,
    Usage,
    frame,
)
from flare_ray.frontend.openai.responses import encode as encode_body
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sources import SourcedText
from flare_ray.frontend.stream import failure_error
from flare_ray.frontend.turn import Turn


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
        usage = None if prepared.include_usage else msgspec.UNSET
        shell = self._envelope(style.chunk_object, [], usage=usage)
        # Choices keep this, so it must not lead back to them.
        self._chunk_frames = partial(chunk_frames, shell)
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
        async for index, event in self._events(streams):
            if isinstance(event, Failed):
                yield _event(ErrorBody(failed_detail(event))) + DONE_FRAME
                return
            if isinstance(event, Delta):
                piece = self._choices[index].frames(event)
            else:
                finished = self._finished[index] = self._counted(event)
                piece = self._chunk_frames(self._choices[index].end(finished))
            if piece:
                yield piece
        last = DONE_FRAME
        if self._prepared.include_usage:
            envelope = self._envelope(self._style.chunk_object, [], usage=self._usage())
            last = frame(envelope) + last
        yield last

    def more(self, delta: Delta) -> bytes:
        """See `AnswerWriter.more`."""
        return self._choices[0].frames(delta)

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
                self._chunk_frames,
                echo=echoes[index] if echoes else None,
                discards=self._prepared.discards,
            )
        turn = self._turns[index] = Turn(self._settings, self._prepared)
        prefix = f"call_{self._prepared.response_id.removeprefix('chatcmpl-')}"
        return ChatChoiceBuilder(index, turn, scored, self._chunk_frames, call_prefix=prefix)

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


def chunk_frames(
    shell: Envelope[ChunkChoice | TextChoice], chunks: Iterable[ChunkChoice | TextChoice]
) -> bytes:
    """Server-sent events of a response, one a chunk; `shell` is an event without any."""
    return b"".join(frame(msgspec.structs.replace(shell, choices=[chunk])) for chunk in chunks)


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

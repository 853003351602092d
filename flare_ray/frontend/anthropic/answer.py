"""From output items to Messages responses: whole, or as events.

    message_start
    per block: content_block_start, content_block_delta ..., content_block_stop   (ping after the
    message_delta (why it ended, all counts), message_stop                          first start)

A failure replaces what is left by one `error` event. While nothing happens, a ping is sent every
PING_S.
"""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence

import msgspec

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.frontend.anthropic.errors import failed_body
from flare_ray.frontend.anthropic.records import (
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from flare_ray.frontend.client import RequestStream
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.openai.responses import encode
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
from flare_ray.frontend.sse import event
from flare_ray.frontend.stream import failure_error
from flare_ray.frontend.turn import Turn

PING_S = 10.0
"""Silence after which a ping is sent: below the idle limits of common proxies (guess)."""


class BlockWriter:
    """Chat events in, block events out; keeps the whole blocks too.

    A text block opens with its first letter that is no white space: what models write between
    reasoning and a call is layout, and clients may not send such blocks back.

    Args:
        show_thinking: hand reasoning out; otherwise it is left out of the answer.
    """

    def __init__(self, *, show_thinking: bool, call_prefix: str) -> None:
        self._show_thinking = show_thinking
        self._call_prefix = call_prefix
        self._layout = ""
        self._open: type[TextBlock] | type[ThinkingBlock] | None = None
        self._pieces: list[str] = []
        self.blocks: list[ContentBlock] = []

    def write(self, events: Sequence[ChatEvent]) -> list[BlockEvent]:
        """Events of newly written output."""
        out: list[BlockEvent] = []
        for item in events:
            if isinstance(item, ToolCall):
                out += self._call(item)
            elif isinstance(item, CallStart):
                out += self._start_call(item)
            elif isinstance(item, CallArguments):
                delta = InputJsonDelta(partial_json=item.text)
                out.append(BlockDelta(index=len(self.blocks) - 1, delta=delta))
            elif isinstance(item, CallEnd):
                out.append(BlockStop(index=len(self.blocks) - 1))
            elif isinstance(item, ContentText):
                out += self._text(item.text)
            elif self._show_thinking:
                out += self._thinking(item)
        return out

    def close(self) -> list[BlockEvent]:
        """End the block that is open, if any."""
        if self._open is None:
            return []
        text, index = "".join(self._pieces), len(self.blocks)
        out: list[BlockEvent] = []
        if self._open is TextBlock:
            self.blocks.append(TextBlock(text=text))
        else:
            signature = b64encode(hashlib.sha256(text.encode()).digest()).decode()
            self.blocks.append(ThinkingBlock(thinking=text, signature=signature))
            out.append(BlockDelta(index=index, delta=SignatureDelta(signature=signature)))
        self._open = None
        return [*out, BlockStop(index=index)]

    def _text(self, text: str) -> list[BlockEvent]:
        out: list[BlockEvent] = []
        if self._open is not TextBlock:
            self._layout += text
            if not self._layout.strip():
                return []
            text, self._layout = self._layout, ""
            out = self._begin(TextBlock, TextBlock(text=""))
        self._pieces.append(text)
        return [*out, BlockDelta(index=len(self.blocks), delta=TextDelta(text=text))]

    def _thinking(self, item: ReasoningText) -> list[BlockEvent]:
        out: list[BlockEvent] = []
        if self._open is not ThinkingBlock:
            out = self._begin(ThinkingBlock, ThinkingBlock(thinking="", signature=""))
        self._pieces.append(item.text)
        return [*out, BlockDelta(index=len(self.blocks), delta=ThinkingDelta(thinking=item.text))]

    def _begin(
        self, kind: type[TextBlock] | type[ThinkingBlock], empty: ContentBlock
    ) -> list[BlockEvent]:
        out = self.close()
        self._open, self._pieces = kind, []
        return [*out, BlockStart(index=len(self.blocks), content_block=empty)]

    def _call(self, call: ToolCall) -> list[BlockEvent]:
        """A call of an answer that is not streamed."""
        out = self._start_call(call)
        arguments = msgspec.Raw(call.arguments.encode())
        self.blocks[-1] = msgspec.structs.replace(self.blocks[-1], input=arguments)
        return out

    def _start_call(self, call: ToolCall | CallStart) -> list[BlockEvent]:
        out, self._layout = self.close(), ""
        call_id = f"{self._call_prefix}_{call.index}"
        self.blocks.append(ToolUseBlock(id=call_id, name=call.name, input={}))
        start = BlockStart(index=len(self.blocks) - 1, content_block=self.blocks[-1])
        return [*out, start]


class MessageAnswer:
    """The response to one prepared request of one choice."""

    def __init__(self, settings: ApiSettings, prepared: Prepared, *, show_thinking: bool) -> None:
        self.more = None
        self._model = settings.model_name
        self._prepared = prepared
        self._turn = Turn(settings, prepared)
        prefix = f"toolu_{prepared.response_id.removeprefix('msg_')}"
        self._blocks = BlockWriter(show_thinking=show_thinking, call_prefix=prefix)

    async def whole(self, streams: Sequence[RequestStream]) -> bytes:
        """The JSON body.

        Raises:
            FlareError: the request failed.
        """
        finished = None
        async for item in streams[0]:
            if isinstance(item, Failed):
                raise failure_error(item)
            if isinstance(item, Delta):
                self._blocks.write(self._turn.add(item))
            else:
                finished = item
        assert finished is not None
        self._blocks.write(self._turn.end())
        self._blocks.close()
        stop = self._stop(finished)
        return encode(
            self._message(
                self._blocks.blocks, stop.stop_reason, stop.stop_sequence, self._usage(finished)
            )
        )

    async def frames(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """Server-sent events; those that are ready together come out as one piece."""
        yield event(MessageStart(message=self._message([], None, None, self._usage(None))))
        pinged = False
        async for item in with_pings(streams[0], PING_S):
            if item is None:
                yield event(Ping())
                continue
            if isinstance(item, Failed):
                yield event(failed_body(item, self._prepared.response_id))
                return
            if isinstance(item, Delta):
                frames = [event(e) for e in self._blocks.write(self._turn.add(item))]
            else:
                frames = self._last(item)
            if frames and not pinged:
                frames.insert(1, event(Ping()))
                pinged = True
            if frames:
                yield b"".join(frames)

    def _last(self, finished: Finished) -> list[bytes]:
        blocks = self._blocks.write(self._turn.end()) + self._blocks.close()
        delta = MessageDelta(delta=self._stop(finished), usage=self._usage(finished))
        return [event(e) for e in (*blocks, delta, MessageStop())]

    def _stop(self, finished: Finished) -> StopDelta:
        if finished.reason == "length":
            return StopDelta(stop_reason="max_tokens", stop_sequence=None)
        if isinstance(finished.stop_reason, str):
            return StopDelta(stop_reason="stop_sequence", stop_sequence=finished.stop_reason)
        reason = "tool_use" if self._turn.num_calls else "end_turn"
        return StopDelta(stop_reason=reason, stop_sequence=None)

    def _usage(self, finished: Finished | None) -> Usage:
        cached = 0 if finished is None else finished.cached_tokens
        return Usage(
            input_tokens=self._prepared.prompt_tokens[0] - cached,
            cache_read_input_tokens=cached,
            output_tokens=0 if finished is None else finished.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._turn.reasoning_tokens),
        )

    def _message(
        self, content: list[ContentBlock], reason: str | None, sequence: str | None, usage: Usage
    ) -> Message:
        return Message(
            id=self._prepared.response_id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


async def with_pings(
    stream: RequestStream, interval_s: float
) -> AsyncIterator[Delta | Finished | Failed | None]:
    """Events of `stream`, and None whenever `interval_s` passed without one."""
    events = aiter(stream)
    waiting = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(events, None))
            done, _ = await asyncio.wait({waiting}, timeout=interval_s)
            if not done:
                yield None
                continue
            item, waiting = waiting.result(), None
            if item is None:
                return
            yield item
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})

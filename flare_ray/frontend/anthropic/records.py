"""Bodies and events of the Messages API as `msgspec` records."""

from __future__ import annotations

from typing import Any

import msgspec


class _Typed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class TextBlock(_Typed, frozen=True, kw_only=True, tag="text"):
    """Part of the visible answer."""

    text: str
    citations: None = None


class ThinkingBlock(_Typed, frozen=True, kw_only=True, tag="thinking"):
    """Reasoning. `signature` is a digest of the text; it is not checked when it comes back."""

    thinking: str
    signature: str


class ToolUseBlock(_Typed, frozen=True, kw_only=True, tag="tool_use"):
    """A call of one of the client's tools."""

    id: str
    name: str
    input: dict[str, Any] | msgspec.Raw


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(_Typed, frozen=True, kw_only=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(_Typed, frozen=True, kw_only=True, tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, kw_only=True, tag="signature_delta"):
    """The digest of a whole thinking block."""

    signature: str


class InputJsonDelta(_Typed, frozen=True, kw_only=True, tag="input_json_delta"):
    """More of a call's arguments."""

    partial_json: str


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """thinking_tokens: part of `output_tokens`."""

    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. `input_tokens` are those that were not read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(_Typed, frozen=True, kw_only=True, tag="message"):
    """The answer; without content and reason where a stream begins."""

    id: str
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class MessageStart(_Typed, frozen=True, kw_only=True, tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(_Typed, frozen=True, kw_only=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: ContentBlock


class BlockDelta(_Typed, frozen=True, kw_only=True, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(_Typed, frozen=True, kw_only=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(_Typed, frozen=True, kw_only=True, tag="message_delta"):
    """The answer has ended; counts are of all of it."""

    delta: StopDelta
    usage: Usage


class MessageStop(_Typed, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


class Ping(_Typed, frozen=True, kw_only=True, tag="ping"):
    """Nothing; it shows that the connection lives."""


class TokensCount(msgspec.Struct, frozen=True):
    """The answer of count_tokens."""

    input_tokens: int


BlockEvent = BlockStart | BlockDelta | BlockStop

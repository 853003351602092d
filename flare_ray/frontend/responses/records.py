"""Bodies and events of the Responses API as `msgspec` records."""

from __future__ import annotations

from typing import Any

import msgspec

from flare_ray.frontend.openai.responses import TokenLogprob


class _Typed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class OutputText(_Typed, frozen=True, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningPart(_Typed, frozen=True, kw_only=True, tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class MessageItem(_Typed, frozen=True, kw_only=True, tag="message"):
    """A piece of the visible answer."""

    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningItem(_Typed, frozen=True, kw_only=True, tag="reasoning"):
    """A piece of reasoning, given as it is: there is no summary."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningPart]


class CallItem(_Typed, frozen=True, kw_only=True, tag="function_call"):
    """A call of one of the client's functions."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


Item = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningPart


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """cached_tokens: prompt tokens restored from a prefix snapshot instead of computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: part of `output_tokens`."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; `output_tokens` includes a terminal token."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Failure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, or its state inside an event. Nothing is stored."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    background: bool = False
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    top_logprobs: int = 0
    truncation: str = "disabled"
    service_tier: str = "default"
    usage: Usage | None
    user: str | None
    metadata: dict[str, str]


class _Event(_Typed, frozen=True, kw_only=True):
    sequence_number: int


class Created(_Event, frozen=True, kw_only=True, tag="response.created"):
    """The request holds its place."""

    response: Response


class InProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    """The answer begins."""

    response: Response


class Completed(_Event, frozen=True, kw_only=True, tag="response.completed"):
    """The answer has ended well."""

    response: Response


class Truncated(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    """The answer has ended at its limit."""

    response: Response


class Failed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    """The answer has ended with an error."""

    response: Response


class ItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: Item


class ItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: Item


class _Inside(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_Inside, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_InPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The content of an item begins, empty."""

    part: Part


class PartDone(_InPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The content of an item is whole."""

    part: Part


class TextDelta(_InPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_InPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(
    _Inside, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(
    _Inside, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The whole arguments."""

    name: str
    arguments: str

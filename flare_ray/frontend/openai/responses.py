"""Response bodies and stream chunks as `msgspec` records: encoded in microseconds, one layout."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

_encode = msgspec.json.Encoder().encode
DONE_FRAME = b"data: [DONE]\n\n"
SourceName = Literal["target", "drafter", "own_text", "history", "prediction", "grammar", "prompt"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens restored from a prefix snapshot instead of computed."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What became of the output.

    Attributes:
        reasoning_tokens: part of `completion_tokens`.
        accepted_prediction_tokens: drafts that are in the output: those copied from the request's
            `prediction`, or from whatever source if it brought none.
        rejected_prediction_tokens: likewise those verified in vain; not in `completion_tokens`.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts; `completion_tokens` includes a terminal token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class FunctionCall(msgspec.Struct, frozen=True):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call; `index` only inside stream deltas."""

    index: int | UnsetType = UNSET
    id: str
    type: str
    function: FunctionCall


class ArgumentsPart(msgspec.Struct, frozen=True):
    """More of a call's arguments."""

    arguments: str


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """More of a call that an earlier chunk has opened."""

    index: int
    function: ArgumentsPart


class Alternative(msgspec.Struct, frozen=True):
    """A token with its text, log-probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative, frozen=True):
    """A generated token and the most probable ones in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of every generated token that a chunk or a message shows, reasoning and calls included."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The same for /v1/completions, one entry a token in every list. An echoed prompt's first token
    has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token in place of a prompt token; `rank` among all tokens, null beyond those reported."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = dict[str, PromptLogprob]
"""By token id: the prompt's own token, and the most probable ones."""


class SourceSpan(msgspec.Struct, frozen=True):
    """Text whose tokens all came from one source (`return_token_sources`).

    A character that is spread over tokens belongs to the one that completed it. `prompt` is an
    echo; the others are `TokenSource`.
    """

    source: SourceName
    text: str


class ChatSources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Spans that add up to the texts of the same names; the arguments of calls have none."""

    content: list[SourceSpan] | UnsetType = UNSET
    reasoning_content: list[SourceSpan] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody | ToolCallPart] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat chunk. `stop_reason` (the stop that matched) only beside the finish."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | tuple[int, ...] | UnsetType = UNSET
    token_sources: ChatSources | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `content` is null where there is none."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | tuple[int, ...] | None = None
    prompt_logprobs: list[PromptLogprobs | None] | UnsetType = UNSET
    token_sources: ChatSources | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a text completion, whole or as a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | tuple[int, ...] | UnsetType | None = UNSET
    prompt_logprobs: list[PromptLogprobs | None] | UnsetType = UNSET
    token_sources: list[SourceSpan] | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", bound=msgspec.Struct)


class Envelope(msgspec.Struct, Generic[ChoiceT], frozen=True, kw_only=True):
    """What every response and every chunk carries.

    Attributes:
        usage: UNSET = key absent; None = null (chunks of a stream that will end with usage).
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /v1/models. `max_model_len` as other servers name the context length."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """/v1/models."""

    object: str = "list"
    data: list[ModelEntry]


class TextFrame:
    """A server-sent event in which one text changes.

    Args:
        empty: the event with "" for that text.
        name: of its field. Quotes inside JSON strings are escaped, so that no other place looks
            like it.
    """

    def __init__(self, empty: bytes, name: str) -> None:
        field = f'"{name}":'.encode()
        before, found, self._after = empty.partition(field + b'""')
        assert found, (name, empty)
        self._before = before + field

    def around(self, text: str) -> bytes:
        """The event with `text`."""
        return self._before + _encode(text) + self._after


def encode(value: msgspec.Struct) -> bytes:
    """JSON."""
    return _encode(value)


def frame(value: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"

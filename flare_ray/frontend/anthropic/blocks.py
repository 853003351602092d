"""Messages made of content blocks, as the messages of a chat request.

A user message's tool results become `tool` messages, its text a `user` message, in the order of
the blocks. An assistant message's text, thinking and tool uses become one message. Blocks that
are no text are refused by name (contract: R9).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described, validated

ERROR_PREFIX = "Error: "
"""Templates have no field for a tool result that is an error; the model reads it in the text."""


class CacheControl(Closed):
    """A mark up to which the client would like the prefix to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Text(Closed):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)


class _Thought(Closed):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _ToolUse(Closed):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class _ToolResult(Closed):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, Described(str | list[_Text] | None)] = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


_USER: Mapping[str, type[Closed]] = {"text": _Text, "tool_result": _ToolResult}
_ASSISTANT: Mapping[str, type[Closed]] = {
    "text": _Text,
    "thinking": _Thought,
    "tool_use": _ToolUse,
}


_NoneEmpty = Field(min_length=1)
_String = Annotated[str, _NoneEmpty]


class _Message(Closed):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _UserMessage(_Message):
    role: Literal["user"]
    content: Annotated[
        str | list[Any], Described(_String | Annotated[list[_Text | _ToolResult], _NoneEmpty])
    ]


class _AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Annotated[
        str | list[Any],
        Described(_String | Annotated[list[_Text | _Thought | _ToolUse], _NoneEmpty]),
    ]


class _SystemMessage(_Message):
    role: Literal["system"]
    content: Annotated[str | list[Any], Described(_String | Annotated[list[_Text], _NoneEmpty])]


_BY_ROLE: Mapping[str, type[_Message]] = {
    "user": _UserMessage,
    "assistant": _AssistantMessage,
    "system": _SystemMessage,
}
Messages = Annotated[
    list[Any],
    Described(Annotated[list[_UserMessage | _AssistantMessage | _SystemMessage], _NoneEmpty]),
]
"""Field of a body that `chat_messages` checks."""
System = Annotated[str | list[Any], Described(str | list[_Text])]
"""Field of a body that `system_text` checks."""


def system_text(system: str | Sequence[Any] | None, path: str = "system") -> str:
    """The system prompt; blocks are joined by blank lines, as paragraphs.

    Raises:
        InvalidRequest: a block is no text.
    """
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(_texts(system, path))


def chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a chat request.

    Raises:
        InvalidRequest: names the offending block by its path.
    """
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    chat: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, raw in enumerate(messages):
        path = f"messages[{i}]"
        role = raw.get("role") if isinstance(raw, dict) else None
        model = _BY_ROLE.get(role, _Message) if isinstance(role, str) else _Message
        message = validated(model, raw, path)
        if message.content in ("", []):
            raise InvalidRequest(f"{path}.content: must not be empty", param=f"{path}.content")
        if message.role == "user":
            chat += _user(message.content, f"{path}.content", calls)
        elif message.role == "system":
            text = system_text(message.content, f"{path}.content")
            chat.append({"role": "system", "content": text})
        else:
            chat.append(_assistant(message.content, f"{path}.content", calls))
    if chat[-1]["role"] == "assistant":
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(
            f"{path}.role: the last message must be the user's: this server does not continue an "
            "answer that the client began",
            param=f"{path}.role",
        )
    return chat


def _user(content: str | list[Any], path: str, calls: set[str]) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    parsed = enumerate(list(_blocks(content, _USER, path)))
    for is_text, group in groupby(parsed, key=lambda entry: isinstance(entry[1], _Text)):
        if is_text:
            yield {"role": "user", "content": "".join(block.text for _, block in group)}
            continue
        for i, block in group:
            yield _result(block, f"{path}[{i}]", calls)


def _result(block: _ToolResult, path: str, calls: set[str]) -> dict[str, Any]:
    if block.tool_use_id not in calls:
        raise InvalidRequest(
            f"{path}.tool_use_id: no tool_use block before it has the id "
            f"{block.tool_use_id[:100]!r}",
            param=f"{path}.tool_use_id",
        )
    where = f"{path}.content"
    if block.content is None or isinstance(block.content, str):
        text = block.content or ""
    elif isinstance(block.content, list):
        text = "".join(_texts(block.content, where))
    else:
        raise InvalidRequest(f"{where}: must be a string or a list of blocks", param=where)
    prefix = ERROR_PREFIX if block.is_error else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": prefix + text}


def _assistant(content: str | list[Any], path: str, calls: set[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text: list[str] = []
    thoughts: list[str] = []
    uses: list[dict[str, Any]] = []
    for block in _blocks(content, _ASSISTANT, path):
        if isinstance(block, _Text):
            text.append(block.text)
        elif isinstance(block, _Thought):
            thoughts.append(block.thinking)
        else:
            calls.add(block.id)
            function = {"name": block.name, "arguments": block.input}
            uses.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if uses:
        message["tool_calls"] = uses
    return message


def _texts(blocks: Sequence[Any], path: str) -> Iterator[str]:
    """Texts of blocks that may be nothing else."""
    return (block.text for block in _blocks(blocks, {"text": _Text}, path))


def _blocks(blocks: Sequence[Any], models: Mapping[str, type[Closed]], path: str) -> Iterator[Any]:
    """Blocks as records."""
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        given = block.get("type") if isinstance(block, dict) else None
        model = models.get(given) if isinstance(given, str) else None
        if model is None:
            raise InvalidRequest(
                f"{where}.type: {str(given)[:60]!r} blocks are not supported here, only "
                f"{', '.join(models)}",
                param=f"{where}.type",
            )
        yield validated(model, block, where)

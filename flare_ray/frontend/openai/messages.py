"""Messages and tools of a chat request, checked and brought into the one form templates read.

What comes out: `role`; `content` always a string (null, missing, "" and [] are the same nothing,
known fault H-16); `tool_calls` with their arguments as objects; `tool_call_id`;
`reasoning_content`. What a template cannot carry is refused by name, image parts among it
(contract: R9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described, validated

TEXT_PARTS = ("text", "input_text", "output_text")
FUNCTION_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"


class _TextPart(Closed):
    type: Literal["text", "input_text", "output_text"]
    text: str


_Parts = list[str | _TextPart]
_Content = Annotated[Any, Described(str | _Parts | None)]


class _Instruction(Closed):
    """System, developer and user messages. A speaker's `name` has no place in the templates."""

    role: Literal["system", "developer", "user"]
    content: Annotated[Any, Described(str | Annotated[_Parts, Field(min_length=1)])]
    name: Literal[None] = None


class _ToolMessage(Closed):
    role: Literal["tool"]
    content: _Content = None
    tool_call_id: str | None = None
    name: str | None = None


class _CalledFunction(Closed):
    name: str = Field(min_length=1)
    arguments: Annotated[Any, Described(str | dict[str, Any] | None)] = None


class _Call(Closed):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: _CalledFunction


class _AssistantMessage(Closed):
    role: Literal["assistant"]
    content: _Content = None
    name: Literal[None] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: Literal[None] = None
    audio: Literal[None] = None
    function_call: Literal[None] = None
    annotations: list[Any] | None = Field(None, max_length=0)


class _Function(Closed):
    name: str = Field(pattern=FUNCTION_NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Closed):
    type: Literal["function"]
    function: _Function


Messages = Annotated[
    list[Any],
    Described(
        Annotated[list[_Instruction | _AssistantMessage | _ToolMessage], Field(min_length=1)]
    ),
]
"""Field of a body that `normalise_messages` checks."""
Tools = Annotated[list[Any], Described(list[_Tool])]
"""Field of a body that `normalise_tools` checks."""

_MODEL_OF_ROLE: Mapping[str, type[Closed]] = {
    "system": _Instruction,
    "developer": _Instruction,
    "user": _Instruction,
    "assistant": _AssistantMessage,
    "tool": _ToolMessage,
}


def normalise_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Template-ready messages. `developer` is rendered as `system`.

    Raises:
        InvalidRequest: names the offending field by its path.
    """
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    return [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalise_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Function declarations, as written but for nulls.

    Raises:
        InvalidRequest: a tool is not a function, or is named twice.
    """
    declared: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        path = f"tools[{i}]"
        parsed = validated(_Tool, tool, path)
        if any(other["function"]["name"] == parsed.function.name for other in declared):
            raise InvalidRequest(
                f"{path}.function.name: {parsed.function.name!r} is declared twice",
                param=f"{path}.function.name",
            )
        declared.append(parsed.model_dump(exclude_none=True))
    return declared


def _normalise(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path, code="invalid_type")
    role = message.get("role")
    model = _MODEL_OF_ROLE.get(role) if isinstance(role, str) else None
    if model is None:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(_MODEL_OF_ROLE)}, got {_short(role)}",
            param=f"{path}.role",
        )
    parsed: Any = validated(model, message, path)
    content = _text(parsed.content, f"{path}.content")
    if isinstance(parsed, _AssistantMessage):
        return _assistant(parsed, content, path)
    if isinstance(parsed, _ToolMessage):
        result: dict[str, Any] = {"role": "tool", "content": content}
        for key, value in (("tool_call_id", parsed.tool_call_id), ("name", parsed.name)):
            if value is not None:
                result[key] = value
        return result
    if parsed.content is None or parsed.content == []:
        raise InvalidRequest(
            f"{path}.content: a {role} message needs content (a string or text parts)",
            param=f"{path}.content",
        )
    return {"role": "system" if role == "developer" else role, "content": content}


def _assistant(parsed: _AssistantMessage, content: str, path: str) -> dict[str, Any]:
    if parsed.reasoning is not None and parsed.reasoning_content not in (None, parsed.reasoning):
        raise InvalidRequest(
            f"{path}: reasoning and reasoning_content differ; send one of them",
            param=f"{path}.reasoning",
        )
    result: dict[str, Any] = {"role": "assistant", "content": content}
    reasoning = parsed.reasoning_content or parsed.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    if parsed.tool_calls:
        result["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(parsed.tool_calls)
        ]
    return result


def _call(call: _Call, path: str) -> dict[str, Any]:
    arguments = call.function.arguments
    where = f"{path}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"{where}: is not valid JSON: {error}", param=where) from error
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: must be a JSON object", param=where)
    function = {"name": call.function.name, "arguments": arguments or {}}
    result: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        result["id"] = call.id
    return result


def _text(content: Any, path: str) -> str:
    """Content as one string; parts are joined without a separator, as templates join them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{path}: must be a string or a list of text parts", param=path, code="invalid_type"
        )
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path, code="invalid_type")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{path}.type: {_short(kind)} parts are not supported by this server, only text",
            param=f"{path}.type",
            code="unsupported_content_part",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{path}.text: a text part needs a string", param=f"{path}.text", code="invalid_type"
        )
    unknown = sorted(set(part) - {"type", "text"})
    if unknown:
        raise InvalidRequest(
            f"{path}.{unknown[0]}: unknown field of a text part",
            param=f"{path}.{unknown[0]}",
            code="unknown_parameter",
        )
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

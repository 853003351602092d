"""Input items of a response as the messages of a chat request.

Neighbouring items of the model (reasoning, its message, its calls) become one assistant message.
Items that are no text are refused by name (contract: R9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described, validated

INPUT_PARTS = ("input_text", "output_text", "text")


class _TextPart(Closed):
    """What an output_text part carries besides its text belongs to the answer it came from."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


_Content = Annotated[str | list[Any], Described(str | list[_TextPart])]


class _Item(Closed):
    """What clients send back with an item they were given; it says nothing to the model."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: Literal["commentary", "final_answer"] | None = None


class _Call(_Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    namespace: Literal[None] = None
    caller: Any = None


class _Output(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class _Thought(Closed):
    type: Literal["reasoning_text"]
    text: str


class _ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: list[_Thought] | None = None
    summary: list[Any] | None = Field(None, max_length=0)
    encrypted_content: Literal[None] = None


Input = Annotated[
    str | list[Any],
    Described(
        Annotated[str, Field(min_length=1)]
        | Annotated[list[_Message | _Call | _Output | _ReasoningItem], Field(min_length=1)]
    ),
]
"""Field of a body that `chat_messages` checks."""

_MODELS: Mapping[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
    "reasoning": _ReasoningItem,
}


def chat_messages(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a chat request.

    Raises:
        InvalidRequest: names the offending item by its path.
    """
    if isinstance(given, str):
        if not given:
            raise InvalidRequest("input: must not be empty", param="input")
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input: must not be empty", param="input")
    chat: list[dict[str, Any]] = []
    calls: set[str] = set()
    ours = False
    for i, raw in enumerate(given):
        path = f"input[{i}]"
        item = _parse(raw, path)
        if isinstance(item, _Output):
            chat.append(_output(item, path, calls))
        elif isinstance(item, _Message) and item.role != "assistant":
            chat.append({"role": item.role, "content": _text(item.content, f"{path}.content")})
        else:
            if not ours:
                chat.append({"role": "assistant", "content": ""})
            _extend(chat[-1], item, path)
            ours = True
            if isinstance(item, _Call):
                calls.add(item.call_id)
            continue
        ours = False
    return chat


def _extend(message: dict[str, Any], item: _Item, path: str) -> None:
    """Add an item of the model to its message."""
    if isinstance(item, _Message):
        message["content"] += _text(item.content, f"{path}.content")
    elif isinstance(item, _ReasoningItem):
        thought = "".join(part.text for part in item.content or ())
        if thought:
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
    elif isinstance(item, _Call):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _output(item: _Output, path: str, calls: set[str]) -> dict[str, Any]:
    if item.call_id not in calls:
        raise InvalidRequest(
            f"{path}.call_id: no function_call before it has the id {item.call_id[:100]!r}",
            param=f"{path}.call_id",
        )
    text = _text(item.output, f"{path}.output")
    return {"role": "tool", "tool_call_id": item.call_id, "content": text}


def _parse(raw: Any, path: str) -> _Item:
    kind = raw.get("type", "message") if isinstance(raw, dict) else None
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequest(
            f"{path}.type: {str(kind)[:60]!r} items are not supported by this server, only "
            f"{', '.join(_MODELS)}",
            param=f"{path}.type",
        )
    # Clients send answers back with every field they know, unset ones too.
    return validated(model, {k: v for k, v in raw.items() if v is not None}, path)


def _text(content: str | Sequence[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in INPUT_PARTS:
        raise InvalidRequest(
            f"{path}.type: {str(kind)[:60]!r} parts are not supported by this server, only "
            "input_text and output_text",
            param=f"{path}.type",
            code="unsupported_content_part",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: must be a string", param=f"{path}.text")
    for name in part:
        # What an output_text part carries besides its text belongs to the answer it came from.
        if name not in ("type", "text", "annotations", "logprobs"):
            raise InvalidRequest(f"{path}.{name[:60]}: unknown field", param=f"{path}.{name[:60]}")
    return str(part["text"])

"""The body of /v1/responses as a chat request. Nothing is stored: what needs storage is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from flare_ray.contracts.plan import MAX_TOP_LOGPROBS
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described, validated
from flare_ray.frontend.responses.items import Input, chat_messages

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "moderation": (),
    "max_tool_calls": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "access_programs": (),
    "background_options": (),
    "image": (),
}
"""Fields that are not built, and the values besides null that ask for nothing. Without `store`
nothing is stored either, and the answer says so."""
LOGPROBS = "message.output_text.logprobs"
"""The one thing that `include` can ask for; all others belong to tools, images or storage."""
RENAMED = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class _Reasoning(Closed):
    effort: str | None = None
    summary: Literal[None] = None
    generate_summary: Literal[None] = None


class _Format(Closed):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class _Text(Closed):
    format: _Format | None = None
    verbosity: Literal[None] = None


class _StreamOptions(Closed):
    include_obfuscation: Literal[False] | None = None


class _Tool(Closed):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class _Choice(Closed):
    type: Literal["function"]
    name: str


class ResponseBody(Closed):
    """POST /v1/responses."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: Annotated[list[Any] | None, Described(list[_Tool] | None)] = None
    tool_choice: Annotated[Any, Described(Literal["none", "auto", "required"] | _Choice | None)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = Field(None, max_length=512)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())


def parse(body: Mapping[str, Any]) -> ResponseBody:
    """`body` as a model.

    Raises:
        InvalidRequest: names each offending field by its path.
    """
    for name, neutral in REFUSED.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise InvalidRequest(
                f"{name} is not supported by this server, which stores nothing; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    included = body.get("include")
    for i, name in enumerate(included if isinstance(included, list) else ()):
        if name != LOGPROBS:
            raise InvalidRequest(
                f"include[{i}]: {str(name)[:60]!r} is not supported by this server, only "
                f"{LOGPROBS}; leave it out",
                param=f"include[{i}]",
                code="unsupported_parameter",
            )
    parsed = validated(ResponseBody, {k: v for k, v in body.items() if k not in REFUSED})
    if parsed.top_logprobs and not parsed.scored:
        raise InvalidRequest(
            f"top_logprobs is only allowed together with include: [{LOGPROBS}]",
            param="top_logprobs",
        )
    return parsed


def chat_request(body: ResponseBody) -> dict[str, Any]:
    """The body of the chat request that asks the same.

    Raises:
        InvalidRequest: names the offending field by its path.
    """
    messages = chat_messages(body.input)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "user": body.user,
    }
    if body.tools:
        chat["tools"] = [_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    if body.scored:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return {name: value for name, value in chat.items() if value is not None}


def _function(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidRequest(
            f"{path}.type: this server runs no tools of its own, only functions of the client; "
            f"got {str(kind)[:60]!r}",
            param=f"{path}.type",
        )
    parsed = validated(_Tool, tool, path)
    function = parsed.model_dump(include={"name", "description", "parameters", "strict"})
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    name = validated(_Choice, choice, "tool_choice").name
    return {"type": "function", "function": {"name": name}}


def _format(given: _Format) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = given.model_dump(include={"name", "description", "strict"})
    schema["schema"] = given.schema_
    return {
        "type": "json_schema",
        "json_schema": {k: v for k, v in schema.items() if v is not None},
    }

"""The body of /v1/messages as a chat request.

What the chat request refuses is refused here in the words of this API. `cache_control` marks are
taken and change nothing: prefixes are reused without them, and for as long as memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.anthropic.blocks import (
    CacheControl,
    Messages,
    System,
    chat_messages,
    system_text,
)
from flare_ray.frontend.closed import Closed, Described, validated
from flare_ray.frontend.settings import ApiSettings

REFUSED: tuple[str, ...] = (
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "mcp_servers",
    "speed",
    "user_profile_id",
    "workspace_id",
)
"""Fields of the API that name services this server has not."""
THINKING_SWITCH = "enable_thinking"
"""Variable by which the templates of this field turn reasoning off."""
RENAMED = {
    ".function.parameters": ".input_schema",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    f"chat_template_kwargs.{THINKING_SWITCH}": "thinking",
}


class _Thinking(Closed):
    type: Annotated[
        Literal["enabled", "disabled", "adaptive"], Described(Literal["disabled", "adaptive"])
    ]
    budget_tokens: Annotated[int | None, Described(None)] = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(Closed):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Closed):
    effort: str | None = None
    format: _Format | None = None


class _Metadata(Closed):
    user_id: str | None = Field(None, max_length=512)


class _ToolChoice(Closed):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Tool(Closed):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[False] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[Any] | None = Field(None, max_length=0)
    allowed_callers: list[Literal["direct"]] | None = None


class CountBody(Closed):
    """POST /v1/messages/count_tokens: what reaches the prompt."""

    model: str
    messages: Messages
    system: System | None = None
    tools: Annotated[list[Any] | None, Described(list[_Tool] | None)] = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def shows_thinking(self) -> bool:
        """Reasoning is part of the answer only where it was asked for, as in the API itself."""
        thinking = self.thinking
        return (
            thinking is not None
            and thinking.type != "disabled"
            and thinking.display in (None, "summarized")
        )


Body = TypeVar("Body", bound=CountBody)


def parse(model: type[Body], body: Mapping[str, Any]) -> Body:
    """`body` as `model`.

    Raises:
        InvalidRequest: names each offending field by its path.
    """
    for name in REFUSED:
        if body.get(name) is not None:
            raise InvalidRequest(
                f"{name} is not supported by this server; leave it out", param=name
            )
    return validated(model, body)


def chat_prompt(settings: ApiSettings, body: CountBody) -> dict[str, Any]:
    """The fields of a chat request that reach the template.

    Raises:
        InvalidRequest: names the offending field by its path.
    """
    messages = chat_messages(body.messages)
    system = system_text(body.system)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        chat["tools"] = [_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice)
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        chat |= _thinking(settings, body.thinking)
    return chat


def chat_request(settings: ApiSettings, body: MessagesBody) -> dict[str, Any]:
    """The body of the chat request that asks the same.

    Raises:
        InvalidRequest: names the offending field by its path.
    """
    chat = chat_prompt(settings, body) | {"max_tokens": body.max_tokens, "stream": body.stream}
    for name in ("temperature", "top_p", "top_k"):
        if getattr(body, name) is not None:
            chat[name] = getattr(body, name)
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        chat["user"] = body.metadata.user_id
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
    return chat


def _function(tool: Any, path: str) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{path}.type: this server runs no tools of its own, only the client's; leave "
            f"{str(tool.get('type'))[:60]!r} out",
            param=f"{path}.type",
        )
    parsed = validated(_Tool, tool, path)
    function = {"name": parsed.name, "parameters": parsed.input_schema}
    for name in ("description", "strict"):
        if getattr(parsed, name) is not None:
            function[name] = getattr(parsed, name)
    return {"type": "function", "function": function}


def _choice(choice: _ToolChoice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice.name: is for type tool, and needed there", param="tool_choice.name"
        )
    function = {"type": "function", "function": {"name": choice.name}}
    chat: dict[str, Any] = {
        "tool_choice": {"any": "required", "tool": function}.get(choice.type, choice.type)
    }
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


def _thinking(settings: ApiSettings, thinking: _Thinking) -> dict[str, Any]:
    if thinking.type == "enabled" or thinking.budget_tokens is not None:
        raise InvalidRequest(
            "thinking.budget_tokens: this server bounds an answer only as a whole, by max_tokens; "
            "send thinking: {type: adaptive}",
            param="thinking.budget_tokens",
        )
    template = settings.codec.template
    if thinking.type == "adaptive":
        return {}
    if template is None or THINKING_SWITCH not in template.variables:
        raise InvalidRequest(
            "thinking: the reasoning of this model cannot be turned off; leave thinking out and "
            "it is not shown",
            param="thinking",
        )
    return {"chat_template_kwargs": {THINKING_SWITCH: False}}

"""What an answer must match, from the fields that say so (contract: K1, A3).

    response_format                  text · json_object · json_schema
    tools, tool_choice, strict,      calls whose arguments validate; required and named calls; one
    parallel_tool_calls              call at most
    structured_outputs               json · json_object · regex · choice · grammar, one of them
    guided_json, guided_regex, ...   older names of the same

Together they are one grammar: reasoning as long as the model likes, then calls or the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from flare_ray.contracts.grammar import AnswerKind, CallSyntax, GrammarSpec, ToolGrammar
from flare_ray.controller.grammar.calls import call_pieces
from flare_ray.errors import InvalidRequest
from flare_ray.frontend.closed import Closed, Described
from flare_ray.recipes.declaration import ChatFormat

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 1024


class JsonSchemaFormat(Closed):
    """The named schema of `response_format`. Whatever `strict` says, the schema is enforced."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


_SCHEMA_ITS_PLACE: JsonDict = {
    "oneOf": [
        {
            "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object"}},
            "required": ["json_schema"],
        },
        {
            "properties": {
                "type": {"enum": ["text", "json_object"]},
                "json_schema": {"type": "null"},
            }
        },
    ]
}


class ResponseFormat(Closed):
    """`response_format`."""

    model_config = ConfigDict(json_schema_extra=_SCHEMA_ITS_PLACE)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "json_schema belongs to type json_schema, and only to it"
            )
        return self


class StructuredOutputs(Closed):
    """`structured_outputs`: exactly one of the fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class _ChosenFunction(Closed):
    name: str


class _NamedChoice(Closed):
    type: Literal["function"]
    function: _ChosenFunction


ToolChoice = Annotated[Any, Described(Literal["none", "auto", "required"] | _NamedChoice | None)]
"""Field of a body that `tool_use` checks."""


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """What the answer itself must be, and which field says so."""

    kind: AnswerKind
    source: str
    param: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tools take part.

    Attributes:
        shown: the model sees them and its calls are parsed.
        required: it must call.
        only: it may call this function alone; "" = any.
    """

    shown: bool
    required: bool = False
    only: str = ""


def tool_use(tool_choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolUse:
    """`tool_choice` against the declared tools.

    Raises:
        InvalidRequest: it is of no known form, or names a function that is not declared.
    """
    if tool_choice is None or tool_choice == "none":
        return ToolUse(shown=bool(tools) and tool_choice is None)
    if tool_choice not in ("auto", "required"):
        only = _named(tool_choice)
        if not any(tool["function"]["name"] == only for tool in tools):
            raise InvalidRequest(
                f"tool_choice: {only!r} is not among the tools",
                param="tool_choice",
            )
        return ToolUse(shown=True, required=True, only=only)
    if not tools:
        raise InvalidRequest("tool_choice is only allowed together with tools", param="tool_choice")
    return ToolUse(shown=True, required=tool_choice == "required")


def _named(tool_choice: Any) -> str:
    if (
        isinstance(tool_choice, Mapping)
        and set(tool_choice) == {"type", "function"}
        and tool_choice["type"] == "function"
        and isinstance(tool_choice["function"], Mapping)
        and set(tool_choice["function"]) == {"name"}
        and isinstance(tool_choice["function"]["name"], str)
    ):
        return str(tool_choice["function"]["name"])
    raise InvalidRequest(
        'tool_choice: send none, auto, required or {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def answer_source(body: Any) -> AnswerSource | None:
    """What the fields of a request body say of the answer; None = any text.

    Args:
        body: a `_GenerationBody`.
    Raises:
        InvalidRequest: two of them do, or one says nothing.
    """
    found = [*_from_response_format(body.response_format), *_from_outputs(body.structured_outputs)]
    for name, kind in (("guided_regex", "regex"), ("guided_grammar", "ebnf")):
        value = getattr(body, name)
        if value is not None:
            found.append(_source(kind, value, name))
    if body.guided_json is not None:
        found.append(_source("json_schema", body.guided_json, "guided_json"))
    if body.guided_choice:
        found.append(_choice(body.guided_choice, "guided_choice"))
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} both describe the answer; send one of them",
            param=found[1].param,
        )
    return found[0] if found else None


def _from_response_format(format_: ResponseFormat | None) -> list[AnswerSource]:
    if format_ is None or format_.type == "text":
        return []
    if format_.json_schema is None or format_.json_schema.schema_ is None:
        return [AnswerSource("json_schema", ANY_OBJECT, "response_format")]
    return [_source("json_schema", format_.json_schema.schema_, "response_format")]


def _from_outputs(outputs: StructuredOutputs | None) -> list[AnswerSource]:
    if outputs is None:
        return []
    param = "structured_outputs"
    found = []
    if outputs.json_ is not None:
        found.append(_source("json_schema", outputs.json_, param))
    if outputs.json_object:
        found.append(AnswerSource("json_schema", ANY_OBJECT, param))
    if outputs.regex is not None:
        found.append(_source("regex", outputs.regex, param))
    if outputs.choice is not None:
        found.append(_choice(outputs.choice, param))
    if outputs.grammar is not None:
        found.append(_source("ebnf", outputs.grammar, param))
    if len(found) != 1:
        raise InvalidRequest(
            "structured_outputs: send exactly one of json, json_object, regex, choice, grammar",
            param=param,
        )
    return found


def _source(kind: Any, value: Any, param: str) -> AnswerSource:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text:
        raise InvalidRequest(f"{param}: must not be empty", param=param)
    return AnswerSource(kind, text, param)


def _choice(values: Sequence[str], param: str) -> AnswerSource:
    if not values or "" in values or len(values) > MAX_CHOICES:
        raise InvalidRequest(
            f"{param}: a choice is one of at most {MAX_CHOICES} texts, none of them empty",
            param=param,
        )
    return AnswerSource("regex", "|".join(map(re.escape, values)), param)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What of the prompt matters: the family's tags, and whether it ends inside reasoning."""

    chat: ChatFormat
    inside_reasoning: bool


def chat_grammar(
    source: AnswerSource | None,
    tools: Sequence[Mapping[str, Any]],
    use: ToolUse,
    *,
    parallel: bool,
    prompt: ChatPrompt,
) -> GrammarSpec | None:
    """The grammar of a chat answer; None if nothing constrains it.

    Raises:
        InvalidRequest: a strict function's parameters cannot be enforced.
    """
    callable_ = [
        (place, tool["function"])
        for place, tool in enumerate(tools)
        if use.shown and use.only in ("", tool["function"]["name"])
    ]
    strict = any(function.get("strict") for _, function in callable_)
    narrow = use.required or strict or (bool(callable_) and not parallel)
    if source is None and not narrow:
        return None
    chat = prompt.chat
    if not chat.reasoning_open:
        reasoning: Literal["none", "open", "optional"] = "none"
    else:
        reasoning = "open" if prompt.inside_reasoning else "optional"
    syntax = call_syntax(chat) if callable_ else None
    kind: AnswerKind = "text" if source is None else source.kind
    return GrammarSpec(
        kind="none" if use.required else kind,
        source="" if source is None or use.required else source.source,
        tools=tuple(
            _tool_grammar(function, place, syntax)
            for place, function in callable_
            if syntax is not None
        ),
        calls="required" if use.required else "optional",
        parallel=parallel,
        syntax=syntax,
        reasoning=reasoning,
        reasoning_open=chat.reasoning_open,
        reasoning_close=chat.reasoning_close,
    )


def call_syntax(chat: ChatFormat) -> CallSyntax:
    """How the family writes calls."""
    return CallSyntax(
        tool_open=chat.tool_open,
        tool_close=chat.tool_close,
        style=chat.tool_style,
        arg_key_open=chat.arg_key_open,
        arg_key_close=chat.arg_key_close,
        arg_value_open=chat.arg_value_open,
        arg_value_close=chat.arg_value_close,
        block_open=chat.tool_block_open,
        block_close=chat.tool_block_close,
    )


def _tool_grammar(function: Mapping[str, Any], place: int, syntax: CallSyntax) -> ToolGrammar:
    """A function's calls. Without `strict` a schema that cannot be enforced is held to the names of
    its arguments, as OpenAI promises no more there."""
    name, parameters = function["name"], function.get("parameters")
    if not parameters:
        return ToolGrammar(name)
    tool = ToolGrammar(name, json.dumps(parameters, ensure_ascii=False))
    try:
        call_pieces(tool, syntax)
    except InvalidRequest as error:
        if function.get("strict"):
            param = f"tools[{place}].function.parameters"
            message = f"{param}: {error}"
            raise InvalidRequest(message, param=param, code=error.code) from error
        return ToolGrammar(name, json.dumps(_names_only(parameters), ensure_ascii=False))
    return tool


def _names_only(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    anything = ["string", "number", "boolean", "null"]
    return {
        "type": "object",
        "properties": {name: {"type": anything} for name in names if name and name == name.strip()},
    }

"""The OpenAPI document, generated from the models that check requests and the records sent back.

Nothing here is written twice: bodies come from the pydantic models, answers from the `msgspec`
records, names of parameters that are taken with their neutral values only from the tables that say
so. A test holds every route of the application against the document, and answers against its
schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel

from flare_ray._version import __version__
from flare_ray.frontend.admin import CacheList, ResetList
from flare_ray.frontend.anthropic import errors as anthropic_errors
from flare_ray.frontend.anthropic.records import Message, TokensCount
from flare_ray.frontend.anthropic.requests import CountBody, MessagesBody
from flare_ray.frontend.openai import errors as openai_errors
from flare_ray.frontend.openai.parameters import NEUTRAL
from flare_ray.frontend.openai.requests import ChatBody, CompletionBody
from flare_ray.frontend.openai.responses import (
    ChatChoice,
    Envelope,
    ModelEntry,
    ModelList,
    TextChoice,
)
from flare_ray.frontend.openai.tokens import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from flare_ray.frontend.responses.records import Response
from flare_ray.frontend.responses.requests import REFUSED, ResponseBody

REF = "#/components/schemas/{name}"
JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    Attributes:
        body: model of the request; None = no body.
        answer: record of the answer; None = plain text or a small fixed object.
        neutral: parameters that are taken only with these values, or null.
        streams: `stream: true` is answered with server-sent events.
        anthropic: failures have the Anthropic shape.
        keyed: needs an API key where keys are in force.
    """

    summary: str
    body: type[BaseModel] | None = None
    answer: Any = None
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    streams: bool = False
    anthropic: bool = False
    keyed: bool = True


_TOKENIZE = Operation("Text or a conversation as token ids", TokenizeBody, TokenizeAnswer)
_DETOKENIZE = Operation("Token ids as text", DetokenizeBody, DetokenizeAnswer)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation", ChatBody, Envelope[ChatChoice], neutral=NEUTRAL, streams=True
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue a text", CompletionBody, Envelope[TextChoice], neutral=NEUTRAL, streams=True
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer input items; nothing is stored",
        ResponseBody,
        Response,
        neutral=REFUSED,
        streams=True,
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation (Anthropic)", MessagesBody, Message, streams=True, anthropic=True
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Length of a conversation (Anthropic)", CountBody, TokensCount, anthropic=True
    ),
    ("GET", "/v1/models"): Operation("The served model", answer=ModelList),
    ("GET", "/v1/models/{model}"): Operation("One model", answer=ModelEntry),
    ("POST", "/tokenize"): _TOKENIZE,
    ("POST", "/v1/tokenize"): _TOKENIZE,
    ("POST", "/detokenize"): _DETOKENIZE,
    ("POST", "/v1/detokenize"): _DETOKENIZE,
    ("GET", "/health"): Operation("Readiness: 200, or 503 until an engine is", keyed=False),
    ("GET", "/health/live"): Operation("Liveness", keyed=False),
    ("GET", "/metrics"): Operation("Prometheus metrics of all engines", keyed=False),
    ("GET", "/admin/cache"): Operation(
        "What each tier of the prefix cache holds; needs the administrator's key",
        answer=CacheList,
        keyed=False,
    ),
    ("POST", "/admin/cache/reset"): Operation(
        "Empty tiers of the prefix cache; needs the administrator's key",
        answer=ResetList,
        keyed=False,
    ),
    ("GET", "/openapi.json"): Operation("This document", keyed=False),
}


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    answers = [op.answer for op in OPERATIONS.values() if op.answer is not None]
    records = [*answers, openai_errors.ErrorBody, anthropic_errors.ErrorBody]
    unique = list(dict.fromkeys(records))
    refs, components = msgspec.json.schema_components(unique, ref_template=REF)
    ref_of = dict(zip(unique, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        item = _operation(operation, ref_of, components)
        if "{model}" in path:
            item["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(path, {})[method.lower()] = item
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "flare_ray", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }


def body_schema(operation: Operation) -> dict[str, Any]:
    """Schema of a request's body, its definitions inside (`$defs`).

    What depends on the deployment (the context, the template's variables, declared tools) is
    checked beyond it.
    """
    assert operation.body is not None
    schema = operation.body.model_json_schema()
    properties = schema["properties"]
    for name, values in operation.neutral.items():
        if name not in properties:
            properties[name] = {
                "enum": [None, *values],
                "description": "Not built: taken with these values only.",
            }
    if "stop" in properties:
        properties["stop"]["anyOf"].append({"type": "string"})
    return schema


def _operation(
    operation: Operation, ref_of: Mapping[Any, Any], components: dict[str, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[JSON_TYPE] = {"schema": ref_of[operation.answer]}
    if operation.streams:
        content[EVENTS_TYPE] = {"schema": {"type": "string"}}
    errors = anthropic_errors if operation.anthropic else openai_errors
    failure = {JSON_TYPE: {"schema": ref_of[errors.ErrorBody]}}
    done = {"description": "Done", "content": content} if content else {"description": "Done"}
    item: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": done, "default": {"description": "Refused", "content": failure}},
    }
    if operation.keyed:
        item["security"] = [{}, {"bearer": []}, {"header": []}]
    if operation.body is not None:
        name = operation.body.__name__
        if name not in components:
            schema = body_schema(operation)
            for inner, definition in schema.pop("$defs", {}).items():
                components[_component(name, inner)] = _moved(definition, name)
            components[name] = _moved(schema, name)
        reference = {"$ref": REF.format(name=name)}
        item["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": reference}}}
    return item


def _component(owner: str, definition: str) -> str:
    """Name of a body's own definition."""
    return f"{owner}.{definition.lstrip('_')}"


def _moved(node: Any, owner: str) -> Any:
    """A schema whose local definitions stand among the document's components."""
    if isinstance(node, list):
        return [_moved(item, owner) for item in node]
    if not isinstance(node, dict):
        return node
    return dict(_moved_items(node, owner))


def _moved_items(node: Mapping[str, Any], owner: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key == "$ref" and isinstance(value, str):
            yield key, REF.format(name=_component(owner, value.removeprefix("#/$defs/")))
        else:
            yield key, _moved(value, owner)

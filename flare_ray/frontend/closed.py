"""Closed, strict models of what clients send, and violations with the path of the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue

from flare_ray.errors import InvalidRequest

MAX_LISTED_PROBLEMS = 5


class Closed(BaseModel):
    """Strict: a JSON string is never taken for a number, nor true for 1."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Described:
    """Annotation of a field that code of ours checks step by step, for the sake of its messages:
    the document describes it by the type that those steps amount to.

    Attributes:
        as_type: that type, made of the models by which the steps check.
    """

    as_type: Any

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Called by pydantic."""
        return handler(TypeAdapter(self.as_type).core_schema)


Model = TypeVar("Model", bound=Closed)


def validated(model: type[Model], value: Any, path: str = "") -> Model:
    """`value`, which stands at `path` of the body, as `model`.

    Raises:
        InvalidRequest: names each offending field by its path, the first one in `param`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _failure(error, path) from error


def _failure(error: ValidationError, prefix: str) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False)
    lines = [_problem(prefix, p["loc"], p["msg"], p.get("input")) for p in problems]
    shown = "; ".join(lines[:MAX_LISTED_PROBLEMS])
    if len(lines) > MAX_LISTED_PROBLEMS:
        shown += f"; and {len(lines) - MAX_LISTED_PROBLEMS} more"
    missing = problems[0]["type"] == "missing"
    return InvalidRequest(
        shown,
        param=_field_path(problems[0]["loc"], prefix) or None,
        code="missing_required_parameter" if missing else "invalid_type",
    )


def _field_path(location: Sequence[int | str], prefix: str) -> str:
    """`messages[0].content` for (0, "content") at `messages`."""
    path = prefix
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _problem(prefix: str, location: Sequence[int | str], message: str, value: Any) -> str:
    path = _field_path(location, prefix)
    if not path:
        return message
    got = "" if message.startswith("Field required") else f" (got {_kind(value)})"
    return f"{path}: {message}{got}"


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", dict: "an object", list: "a list"}
    if value is None:
        return "null"
    if type(value) in (int, float):
        return str(value)
    return names.get(type(value), type(value).__name__)

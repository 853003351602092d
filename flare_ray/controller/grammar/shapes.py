"""Whether a document is a JSON schema at all: every keyword of every part is of its kind.

Checked once, over the whole document and before anything is merged or left out: later a neighbour
would hide what is wrong (the larger of two `minLength`, a type that a keyword does not speak of).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flare_ray.controller.grammar.schema import (
    LISTS,
    MAPS,
    SINGLE,
    Schema,
    count_of,
    names_of,
    properties_of,
    refused,
    short,
    types_of,
)

_COUNTS = ("Length", "Items", "Properties")
COUNTS = tuple(f"{bound}{what}" for bound in ("min", "max") for what in _COUNTS)
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TEXTS = ("pattern", "format", "$ref")


def check_shapes(schema: Any) -> None:
    """Look at every part of `schema`, those that nothing refers to included.

    Keywords that are not known here and those that constrain nothing pass; the former are refused
    where something refers to them.

    Raises:
        InvalidRequest: names the part and its keyword.
    """
    todo: list[tuple[Any, str]] = [(schema, "#")]
    while todo:
        part, path = todo.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise refused(path, f"a schema is an object or a boolean, got {short(part)}")
        _check_values(part, path)
        todo += _parts(part, path)


def _check_values(part: Schema, path: str) -> None:
    types_of(part, path)
    names_of(part, path)
    properties_of(part, path)
    for key in part.keys() & COUNTS:
        count_of(part, key, None, path)
    for key in part.keys() & NUMBERS:
        if not _is_number(part[key]):
            raise refused(path, f"{key} is a number, got {short(part[key])}")
    for key in part.keys() & TEXTS:
        if not isinstance(part[key], str):
            raise refused(path, f"{key} is a string, got {short(part[key])}")
    if not isinstance(part.get("enum", []), list):
        raise refused(path, "enum is a list of values")
    if not isinstance(part.get("uniqueItems", False), bool):
        raise refused(path, "uniqueItems is true or false")


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _parts(part: Schema, path: str) -> Iterator[tuple[Any, str]]:
    """Schemas directly inside `part`."""
    for key in part.keys() & MAPS:
        if not isinstance(part[key], Mapping):
            raise refused(path, f"{key} is an object")
        yield from ((value, f"{path}/{key}/{name}") for name, value in part[key].items())
    for key in part.keys() & LISTS:
        if not isinstance(part[key], list) or not part[key]:
            raise refused(path, f"{key} is a list of at least one schema")
        yield from ((value, f"{path}/{key}/{place}") for place, value in enumerate(part[key]))
    if isinstance(part.get("items"), list):
        raise refused(path, "a list of items: write it as prefixItems")
    for key in part.keys() & SINGLE:
        yield part[key], f"{path}/{key}"

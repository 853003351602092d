"""Argument values in styles that do not mark strings: raw text to JSON, by the tool's own schema.

They write strings raw and everything else as JSON, so `123` is ambiguous: the schema of the
argument decides, and where it admits several types the non-string reading wins only if it is one
of them. A value that is not what its schema says stays a string: the caller of the tool sees what
the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_SCHEMA_DEPTH = 16
"""Nesting of anyOf, oneOf, allOf and $ref that is followed; deeper parts admit every type."""


def argument_json(raw: str, schema: Mapping[str, Any], key: str) -> str:
    """JSON text of one argument.

    Args:
        raw: text between the value's tags, untouched.
        schema: the function's parameter schema; empty = unknown.
        key: the argument's name.
    """
    admitted = _types_of(schema, key)
    if admitted != {"string"}:
        text = raw.strip()
        value = strict_json(text)
        if value is not INVALID_JSON and _type_names(value) & admitted:
            # A quoted string is JSON too, but this style writes strings raw: a string schema keeps
            # the quotes, an unknown schema cannot tell and takes the text as written.
            return text if not isinstance(value, str) else json.dumps(raw, ensure_ascii=False)
    return json.dumps(raw, ensure_ascii=False)


def takes_only_strings(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an argument is a string whatever its text; arguments as in `argument_json`."""
    return _types_of(schema, key) == {"string"}


def _types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Types that the schema admits for an argument."""
    properties = schema.get("properties")
    own = properties.get(key, {}) if isinstance(properties, Mapping) else {}
    return _admitted_types(own, schema, MAX_SCHEMA_DEPTH)


INVALID_JSON = object()
"""What `strict_json` returns for text that is not JSON (None is a JSON value)."""


def strict_json(text: str) -> Any:
    """The value of JSON text; NaN, infinities and numbers out of range are not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return INVALID_JSON


def _type_names(value: Any) -> set[str]:
    """Schema type names that `value` satisfies."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _admitted_types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types that `schema` admits; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set(JSON_TYPES)
    admitted = set(JSON_TYPES)
    declared = schema.get("type")
    if isinstance(declared, str):
        admitted &= {declared}
    elif isinstance(declared, list):
        admitted &= {name for name in declared if isinstance(name, str)}
    if "integer" not in admitted and "number" in admitted:
        admitted.add("integer")
    if isinstance(schema.get("enum"), list):
        admitted &= set().union(*(_type_names(value) for value in schema["enum"]))
    if "const" in schema:
        admitted &= _type_names(schema["const"])
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options:
            admitted &= set().union(*(_admitted_types(o, root, depth - 1) for o in options))
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            admitted &= _admitted_types(part, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        admitted &= _admitted_types(_resolve(reference, root), root, depth - 1)
    return admitted & JSON_TYPES or set(JSON_TYPES)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a local reference (`#/$defs/name`) names; None if there is none."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node

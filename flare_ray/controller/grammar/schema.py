"""JSON schemas brought into the form that generation needs: one type, one constraint of a kind.

Generation needs soundness: what is generated must validate. So a schema may be narrowed (an object
with declared properties gets no others), but no keyword is ever dropped: what cannot be honoured is
refused by name (contract: K1, style: no silent combination).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flare_ray.errors import InvalidRequest

Schema = Mapping[str, Any]

MAX_DEPTH = 64
"""Nesting of schemas, and of merges."""
MAX_MERGES = 20_000
"""Parts of a document with what stands in for its references; two references in one place double
it with every level."""
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
    )
)
"""Keywords that constrain nothing."""
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "patternProperties",
    "unevaluatedProperties",
)
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
KEYWORDS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(_OBJECT),
    "array": frozenset(_ARRAY),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
COMBINING = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
KNOWN = ANNOTATIONS | COMBINING | frozenset().union(*KEYWORDS_OF_TYPE.values())
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SEVERAL = MAPS | LISTS
"""Keywords that hold schemas by name, and in order."""
SINGLE = frozenset({"additionalProperties", "propertyNames", "items"})
SINGLE |= frozenset({"unevaluatedProperties", "unevaluatedItems"})
PLACES = SEVERAL | SINGLE
_LARGEST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_SMALLEST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}


def refused(path: str, why: str) -> InvalidRequest:
    """The refusal of the schema at `path` ("" = the whole)."""
    return InvalidRequest(f"schema{path and ' at ' + path}: {why}", code="invalid_grammar")


def check_keywords(schema: Any, path: str) -> Schema:
    """`schema` as a mapping without annotations.

    Raises:
        InvalidRequest: it has keywords that cannot be honoured.
    """
    if schema is True:
        return {}
    if schema is False:
        return {"enum": []}
    unknown = sorted(set(schema) - KNOWN)
    if unknown:
        raise refused(path, f"{short(unknown[0])} is not supported; leave it out")
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _member(holder: Any, part: str) -> Any:
    """What a pointer's part names; None if nothing."""
    key = part.replace("~1", "/").replace("~0", "~")
    if isinstance(holder, Mapping):
        return holder.get(key)
    if isinstance(holder, list) and key.isdecimal() and int(key) < len(holder):
        return holder[int(key)]
    return None


class Resolver:
    """Local references of one schema document.

    Attributes:
        root: the document.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._merges = 0

    def target(self, reference: str, path: str) -> Any:
        """The part of the document that `reference` names.

        Raises:
            InvalidRequest: it names none, or another document.
        """
        if reference != "#" and not reference.startswith("#/"):
            raise refused(path, f"$ref {short(reference)}: only #/... of the schema itself")
        node: Any = self.root
        parts = iter(reference.split("/")[1:])
        for keyword in parts:
            node = _member(node, keyword) if keyword in PLACES else None
            if keyword in SEVERAL:
                node = _member(node, next(parts, ""))
            if node is None:
                raise refused(path, f"$ref {short(reference)} names no schema")
        return node

    def flat(self, schema: Any, path: str, depth: int = 0) -> Schema:
        """`schema` with allOf and references beside other keywords merged in; a lone $ref stays.

        Raises:
            InvalidRequest: it cannot be merged.
        """
        if depth > MAX_DEPTH:
            raise refused(path, "references or allOf lead nowhere, or too deep")
        self._merges += 1
        if self._merges > MAX_MERGES:
            raise refused(
                "",
                f"it is too large: more than {MAX_MERGES} parts once references and "
                "allOf are resolved",
            )
        own = dict(check_keywords(schema, path))
        parts = own.pop("allOf", [])
        if set(own) == {"$ref"} and not parts:
            return own
        if "$ref" in own:
            parts = [*parts, self.target(own.pop("$ref"), path)]
        for place, part in enumerate(parts):
            flat = self.flat(part, f"{path}/allOf/{place}", depth + 1)
            if set(flat) == {"$ref"}:
                flat = self.flat(self.target(flat["$ref"], path), path, depth + 1)
                if set(flat) == {"$ref"}:
                    flat = self.flat({"allOf": [flat, {}]}, path, depth + 1)
            own = self.merged(own, flat, path)
        return own

    def resolved(self, schema: Any, path: str) -> Schema:
        """As `flat`, a lone $ref followed too."""
        flat = self.flat(schema, path)
        return self.flat({"allOf": [flat]}, path) if "$ref" in flat else flat

    def merged(self, left: Schema, right: Schema, path: str) -> dict[str, Any]:
        """A flat schema that admits at most what both admit.

        Raises:
            InvalidRequest: the two cannot be expressed as one.
        """
        result = dict(left)
        _merge_objects(result, right, path)
        for key, value in right.items():
            if key in ("properties", "required", "additionalProperties"):
                continue
            if key not in result:
                result[key] = value
            elif key in _LARGEST or key in _SMALLEST:
                result[key] = (max if key in _LARGEST else min)(result[key], value)
            elif key == "type":
                result[key] = _common_types(result[key], value)
            elif key in ("enum", "const"):
                result["enum"] = (
                    [v for v in result[key] if same_in(v, value)]
                    if (key == "enum")
                    else ([value] if same(value, result["const"]) else [])
                )
                result.pop("const", None)
            elif key == "items":
                result[key] = {"allOf": [result[key], value]}
            elif key == "uniqueItems":
                result[key] = bool(result[key]) or bool(value)
            elif not same(result[key], value):
                raise refused(path, f"two different {key} cannot be combined")
        return result


def _merge_objects(result: dict[str, Any], right: Schema, path: str) -> None:
    """Merge the three keywords that speak of one another."""
    names = ("properties", "additionalProperties")
    if any(name in result for name in names) and any(name in right for name in names):
        ours, theirs = properties_of(result, path), properties_of(right, path)
        extra = (result.get("additionalProperties", True), right.get("additionalProperties", True))
        result["properties"] = {
            name: _both(ours.get(name, extra[0]), theirs.get(name, extra[1]))
            for name in [*ours, *(name for name in theirs if name not in ours)]
        }
        result["additionalProperties"] = _both(*extra)
    else:
        result.update({name: right[name] for name in names if name in right})
    if "required" in right:
        result["required"] = [*names_of(result, path), *names_of(right, path)]


def _both(left: Any, right: Any) -> Any:
    if left is True or left is right:
        return right
    return left if right is True else {"allOf": [left, right]}


def properties_of(schema: Schema, path: str) -> Mapping[str, Any]:
    """Declared properties."""
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise refused(path, "properties is an object")
    return properties


def names_of(schema: Schema, path: str) -> list[str]:
    """Required names."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused(path, "required is a list of names")
    return required


def types_of(schema: Schema, path: str) -> tuple[str, ...]:
    """Types that a flat schema admits; without `type` those that its keywords speak of, else all.

    Keywords of one type beside another type constrain nothing there.
    """
    declared = schema.get("type")
    if declared is None:
        spoken = tuple(
            name for name in TYPES if KEYWORDS_OF_TYPE.get(name, frozenset()) & set(schema)
        )
        return spoken or tuple(name for name in TYPES if name != "integer")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(n, str) and n in TYPES for n in names):
        raise refused(path, f"type {short(declared)}: use {', '.join(TYPES)}")
    return tuple(dict.fromkeys(names))


def _common_types(left: Any, right: Any) -> list[str]:
    first = [left] if isinstance(left, str) else left
    second = [right] if isinstance(right, str) else right
    common = [name for name in first if name in second]
    if "integer" in [*first, *second] and "integer" not in common:
        other = second if "integer" in first else first
        common += ["integer"] if "number" in other else []
    return common


def type_of(value: Any) -> str:
    """Type name of a JSON value; whole floats are integers too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    for kind, name in ((float, "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: true is not 1, and 1.0 is 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def same_in(value: Any, values: Any) -> bool:
    """Whether `values` holds `value`."""
    return any(same(value, other) for other in values)


def are_apart(branches: Sequence[Schema], path: str) -> bool:
    """Whether no value can match two of the flat schemas (needed for oneOf)."""
    return all(
        _two_apart(left, right, path)
        for place, left in enumerate(branches)
        for right in branches[place + 1 :]
    )


def _two_apart(left: Schema, right: Schema, path: str) -> bool:
    values = [_values(left), _values(right)]
    if values[0] is not None and values[1] is not None:
        return not any(same_in(value, values[1]) for value in values[0])
    for mine, other in ((values[0], right), (values[1], left)):
        if mine is not None and "type" in other:
            kinds = set(types_of(other, path))
            kinds |= {"integer"} if "number" in kinds else set()
            return not any(type_of(value) in kinds for value in mine)
    if "type" not in left or "type" not in right:
        return False
    common = set(_common_types(list(types_of(left, path)), list(types_of(right, path))))
    if not common:
        return True
    return common == {"object"} and _told_apart(left, right, path)


def _told_apart(left: Schema, right: Schema, path: str) -> bool:
    """Whether a property that both require has different constants."""
    mine, theirs = properties_of(left, path), properties_of(right, path)
    for name in set(names_of(left, path)) & set(names_of(right, path)):
        first, second = mine.get(name), theirs.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            values = _values(first), _values(second)
            if values[0] is not None and values[1] is not None:
                return not any(same_in(value, values[1]) for value in values[0])
    return False


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def count_of(schema: Schema, key: str, default: int | None, path: str) -> int | None:
    """A keyword that is a count; `default` where it is absent.

    Raises:
        InvalidRequest: it is no whole number >= 0.
    """
    value = schema.get(key, default)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refused(path, f"{key} is a whole number of at least 0, got {short(value)}")
    return value


def without(schema: Schema, keys: Iterable[str]) -> dict[str, Any]:
    """The schema without some keywords."""
    dropped = set(keys)
    return {key: value for key, value in schema.items() if key not in dropped}


def short(value: Any) -> str:
    """A value in a message."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text) if len(text) <= 60 else repr(text[:57] + "...")

"""JSON documents that validate against a schema, as language expressions (contract: K1).

Layout: white space stands behind `{`, `[`, `,` and `:` and before `}` and `]`, where it is nothing,
one space, or a line break with at most MAX_INDENT blanks: a model can never idle in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from flare_ray.controller.grammar import numbers
from flare_ray.controller.grammar.formats import FORMATS
from flare_ray.controller.grammar.language import (
    EMPTY,
    NEVER,
    Alt,
    Chars,
    Expr,
    Name,
    Seq,
    Text,
    alt,
    optional,
    repeat,
    seq,
)
from flare_ray.controller.grammar.regex import MAX_REPEAT, regex_language
from flare_ray.controller.grammar.schema import (
    KEYWORDS_OF_TYPE,
    MAX_DEPTH,
    Resolver,
    Schema,
    are_apart,
    count_of,
    names_of,
    properties_of,
    refused,
    same_in,
    type_of,
    types_of,
    without,
)
from flare_ray.controller.grammar.strings import END, STRING_RULES, bounded_string, json_characters

MAX_INDENT = 32
ANY_DEPTH = 12
"""Nesting of values that a schema leaves open."""
SPACE = Name("space")
COMMA = seq(Text(","), SPACE)


def base_rules() -> dict[str, Expr]:
    """Rules that every JSON language may name."""
    blank = Chars(((0x09, 0x09), (0x20, 0x20)))
    rules = {
        "space": alt((EMPTY, Text(" "), seq(Text("\n"), repeat(blank, 0, MAX_INDENT)))),
        **STRING_RULES,
        "number": numbers.any_number(),
        "integer": numbers.any_integer(),
        "boolean": alt((Text("true"), Text("false"))),
        "null": Text("null"),
    }
    scalars = [Name(name) for name in ("string", "number", "boolean", "null")]
    for depth in range(ANY_DEPTH):
        item = Name(f"any{depth - 1}") if depth else alt(scalars)
        member = seq(Name("string"), Text(":"), SPACE, item)
        rules[f"object{depth}"] = _bracketed("{", _counted(member, 0, None), "}")
        rules[f"array{depth}"] = _bracketed("[", _counted(item, 0, None), "]")
        rules[f"any{depth}"] = alt((*scalars, Name(f"object{depth}"), Name(f"array{depth}")))
    return rules


class JsonLanguage:
    """Rules of one schema document.

    Args:
        schema: JSON schema, decoded, its shapes checked.
        part: the part of it that the document must match; None = the whole.
        resolver: of `schema`, shared by its parts; None = a new one.
    Attributes:
        rules: by name; `root` is the document.
    Raises:
        InvalidRequest: the schema contradicts itself, or asks for what cannot be enforced.
    """

    def __init__(self, schema: Any, part: Any = None, resolver: Resolver | None = None) -> None:
        self.rules = base_rules()
        self._resolver = resolver or Resolver(schema)
        self._open: list[tuple[str, str]] = []
        self.rules["root"] = self.expression(schema if part is None else part, "#", 0)
        while self._open:
            rule, reference = self._open.pop()
            target = self._resolver.target(reference, reference)
            self.rules[rule] = self.expression(target, reference, 0)
        _refuse_loops(self.rules)

    def expression(self, schema: Any, path: str, depth: int) -> Expr:
        """Documents of one part of the schema."""
        if depth > MAX_DEPTH:
            raise refused(path, f"nested deeper than {MAX_DEPTH}")
        flat = self._resolver.flat(schema, path)
        if "$ref" in flat:
            return self._reference(flat["$ref"], path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in flat:
                return self._branches(flat, keyword, path, depth)
        if "enum" in flat or "const" in flat:
            return alt(Text(_literal(value, path)) for value in literal_values(flat, path))
        kinds = types_of(flat, path)
        if "number" in kinds:
            kinds = tuple(kind for kind in kinds if kind != "integer")
        if not kinds:
            return NEVER
        return alt(self._typed(kind, flat, path, depth) for kind in kinds)

    def _reference(self, reference: Any, path: str) -> Expr:
        self._resolver.target(reference, path)
        rule = f"ref:{reference}"
        if rule not in self.rules:
            self.rules[rule] = NEVER
            self._open.append((rule, reference))
        return Name(rule)

    def _branches(self, flat: Schema, keyword: str, path: str, depth: int) -> Expr:
        branches = flat[keyword]
        rest = without(flat, [keyword])
        places = [f"{path}/{keyword}/{place}" for place in range(len(branches))]
        if keyword == "oneOf":
            seen = list(map(self._resolver.resolved, branches, places))
            if len(seen) > 1 and not are_apart(seen, path):
                raise refused(
                    path,
                    "oneOf: its parts may overlap, which cannot be excluded; give them different "
                    "types or constants, or use anyOf",
                )
        parts = [branch if not rest else {"allOf": [rest, branch]} for branch in branches]
        return alt(
            self.expression(part, where, depth + 1)
            for part, where in zip(parts, places, strict=True)
        )

    @staticmethod
    def pattern_of(own: Schema) -> str:
        """The pattern that a flat string schema's `pattern` or `format` stands for."""
        return str(own["pattern"]) if "pattern" in own else FORMATS[own["format"]]

    def _typed(self, kind: str, flat: Schema, path: str, depth: int) -> Expr:
        known = KEYWORDS_OF_TYPE.get("number" if kind == "integer" else kind, frozenset())
        own = {key: value for key, value in flat.items() if key in known}
        if kind == "object":
            return self._object(own, path, depth)
        if kind == "array":
            return self._array(own, path, depth)
        if kind == "string":
            return self._string(own, path)
        if kind in ("number", "integer"):
            return _number(kind, own, path)
        return Name(kind)

    # Objects.

    def _object(self, own: Schema, path: str, depth: int) -> Expr:
        properties, required = properties_of(own, path), list(dict.fromkeys(names_of(own, path)))
        extra = own.get("additionalProperties", True)
        if own.get("unevaluatedProperties", True) is False and "additionalProperties" not in own:
            extra = False
        elif own.get("unevaluatedProperties", True) not in (True, False):
            raise refused(path, "unevaluatedProperties may only be true or false")
        least = count_of(own, "minProperties", 0, path) or 0
        most = count_of(own, "maxProperties", None, path)
        wanted = {**properties, **{name: extra for name in required if name not in properties}}
        _check_names(own, wanted, path)
        if not wanted and not (extra is False or own.get("patternProperties")):
            return self._map(own, extra, (least, most), (path, depth))
        members: list[tuple[Expr, bool]] = []
        for name, schema in wanted.items():
            where = f"{path}/properties/{name}"
            value = self.expression(schema, where, depth + 1)
            key = Text(json.dumps(name, ensure_ascii=False) + ":")
            members.append((seq(key, SPACE, value), name in required))
        return _members(members, least, most, path)

    def _map(
        self, own: Schema, extra: Any, bounds: tuple[int, int | None], place: tuple[str, int]
    ) -> Expr:
        """An object whose names are free; a name may come twice, so that only "at least one" can
        be told of its size."""
        path, depth = place
        least, most = bounds
        if least > 1:
            raise refused(path, f"minProperties {least} without declared properties: at most 1")
        if most is not None and most < least:
            return NEVER
        names: Expr = Name("string")
        if "propertyNames" in own:
            names = self._names(own["propertyNames"], path, depth)
        elif extra is True and (least, most) == (0, None):
            return Name(f"object{ANY_DEPTH - 1}")
        member = seq(names, Text(":"), SPACE, self.expression(extra, path, depth + 1))
        return _bracketed("{", _counted(member, least, most), "}")

    def _names(self, schema: Any, path: str, depth: int) -> Expr:
        flat = self._resolver.flat(schema, path)
        return self.expression({"allOf": [flat, {"type": "string"}]}, path, depth + 1)

    # Arrays.

    def _array(self, own: Schema, path: str, depth: int) -> Expr:
        first, rest = _items(own, path)
        least = count_of(own, "minItems", 0, path) or 0
        most = count_of(own, "maxItems", None, path)
        if own.get("uniqueItems") and (most is None or most > 1):
            raise refused(path, "uniqueItems cannot be enforced; leave it out or set maxItems: 1")
        if most is not None and most < least:
            return NEVER
        if not first and rest is True and (least, most) == (0, None):
            return Name(f"array{ANY_DEPTH - 1}")
        after = self.expression(rest, f"{path}/items", depth + 1)
        if not first:
            return _bracketed("[", _counted(after, least, most), "]")
        known = [
            self.expression(item, f"{path}/prefixItems/{place}", depth + 1)
            for place, item in enumerate(first)
        ]
        return _bracketed("[", _tuple(known, after, least, most), "]")

    # Strings.

    def _string(self, own: Schema, path: str) -> Expr:
        least = count_of(own, "minLength", 0, path) or 0
        most = count_of(own, "maxLength", None, path)
        pattern, named = own.get("pattern"), own.get("format")
        if least > MAX_REPEAT or (most or 0) > MAX_REPEAT:
            raise refused(path, f"a length of more than {MAX_REPEAT}")
        if most is not None and most < least:
            return NEVER
        if named is not None:
            if named not in FORMATS:
                raise refused(path, f"format {named!r}: use {', '.join(FORMATS)}, or a pattern")
            if pattern is not None:
                raise refused(path, "pattern beside format cannot be enforced; use one of them")
            pattern = FORMATS[named]
        if pattern is None:
            if not least and most is None:
                return Name("string")
            return bounded_string(self.rules, least, most)
        if least or most is not None:
            raise refused(
                path,
                "a length beside pattern or format cannot be enforced; put it into the pattern",
            )
        text = regex_language(pattern, self.rules, search=True, encode=json_characters, tail=END)
        return seq(END, text)


def literal_values(flat: Schema, path: str) -> list[Any]:
    """Values of enum and const that satisfy what stands beside them.

    Raises:
        InvalidRequest: beside them stands what is not checked here.
    """
    values = flat.get("enum", [flat.get("const")])
    if "enum" in flat and "const" in flat:
        values = [value for value in values if same_in(value, [flat["const"]])]
    kinds = set(types_of(flat, path)) if "type" in flat else None
    unchecked = set(flat) - {"enum", "const", "type"} - KEYWORDS_OF_TYPE["number"]
    unchecked -= {"minLength", "maxLength", "pattern"}
    if unchecked:
        raise refused(path, f"{sorted(unchecked)[0]} beside enum or const is not supported")
    return [value for value in values if _admits(flat, kinds, value, path)]


def _bracketed(opening: str, content: Expr, closing: str) -> Expr:
    return seq(Text(opening), SPACE, content, SPACE, Text(closing))


def _counted(item: Expr, least: int, most: int | None) -> Expr:
    """`least` .. `most` items with commas between them."""
    more = repeat(seq(COMMA, item), max(least - 1, 0), None if most is None else max(most - 1, 0))
    some = seq(item, more) if most != 0 else NEVER
    return some if least else optional(some)


def _tuple(known: Sequence[Expr], after: Expr, least: int, most: int | None) -> Expr:
    """Items of which the first ones have languages of their own; built from the last one on."""
    limit = len(known) if most is None else min(len(known), most)
    room = None if most is None else most - limit
    tail = repeat(seq(COMMA, after), max(least - limit, 0), room)
    if limit < len(known):
        tail = EMPTY
    for place in range(limit - 1, -1, -1):
        here = known[place] if place == 0 else seq(COMMA, known[place])
        tail = seq(here, tail) if tail != EMPTY else here
        if place >= least:
            tail = optional(tail)
    return tail


def _members(members: Sequence[tuple[Expr, bool]], least: int, most: int | None, path: str) -> Expr:
    """An object's declared members in order, commas between those that are there."""
    needed = sum(required for _, required in members)
    if most is not None and most < needed:
        return NEVER
    if most is not None and most < len(members):
        members = [member for member in members if member[1]]
    if least > max(needed, 1):
        if least > len(members):
            raise refused(path, f"minProperties {least}, only {len(members)} are declared")
        members = [(member, True) for member, _ in members]
    behind: Expr = EMPTY  # what may follow once a member is there
    alone: Expr = EMPTY if least == 0 or needed else NEVER  # what may follow as long as none is
    for member, required in reversed(members):
        first = seq(member, behind) if behind != EMPTY else member
        if required:
            alone, behind = first, seq(COMMA, first)
        else:
            alone = alt((first, alone))
            if member != NEVER:
                behind = seq(optional(seq(COMMA, member)), behind)
    return _bracketed("{", alone, "}")


def _check_names(own: Schema, wanted: Mapping[str, Any], path: str) -> None:
    """Keywords about names, held against the declared ones: no others are generated."""
    for pattern in own.get("patternProperties", {}):
        if any(_searches(pattern, name, path) for name in wanted):
            raise refused(path, f"patternProperties {pattern!r} matches a declared property")
    names = own.get("propertyNames", True)
    if names is True or not wanted:
        return
    simple = isinstance(names, Mapping) and set(names) <= {"type", "pattern", "minLength"}
    if not simple or names.get("type", "string") != "string":
        raise refused(path, "propertyNames beside properties: only pattern and minLength")
    for name in wanted:
        if not _admits(names, None, name, path):
            raise refused(path, f"property {name!r} contradicts propertyNames")


def _items(own: Schema, path: str) -> tuple[list[Any], Any]:
    """Schemas of the first items, and the one of those behind."""
    items, first = own.get("items", True), own.get("prefixItems", [])
    if own.get("unevaluatedItems", True) is False and "items" not in own:
        items = False
    elif own.get("unevaluatedItems", True) not in (True, False):
        raise refused(path, "unevaluatedItems may only be true or false")
    return first, items


# Scalars.


def _number(kind: str, own: Schema, path: str) -> Expr:
    low, high = _bound(own, "minimum"), _bound(own, "maximum")
    above, below = _bound(own, "exclusiveMinimum"), _bound(own, "exclusiveMaximum")
    if (low, high, above, below) == (None,) * 4:
        return Name(kind)
    if kind == "integer":
        lows = [math.ceil(low)] if low is not None else []
        lows += [math.floor(above) + 1] if above is not None else []
        highs = [math.floor(high)] if high is not None else []
        highs += [math.ceil(below) - 1] if below is not None else []
        return numbers.integers(
            max(lows, default=-numbers.LARGEST), min(highs, default=numbers.LARGEST)
        )
    if above is not None and (low is None or above >= low):
        low = above + _step(above)
    if below is not None and (high is None or below <= high):
        high = below - _step(below)
    return numbers.numbers(low, high)


def _step(bound: Decimal) -> Decimal:
    """One in the place behind the bound's last one, third at least: what keeps out the bound."""
    exponent = bound.normalize().as_tuple().exponent
    return Decimal(1).scaleb(min(int(exponent) - 1, -3))


def _bound(own: Schema, key: str) -> Decimal | None:
    value = own.get(key)
    if value is None:
        return None
    return Decimal(str(value)) if isinstance(value, float) else Decimal(value)


def _admits(flat: Schema, kinds: set[str] | None, value: Any, path: str) -> bool:
    """Whether a value satisfies the scalar keywords beside an enum."""
    kind = type_of(value)
    if kinds is not None and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return False
    if kind in ("integer", "number"):
        number = Decimal(str(value))
        bounds = {key: _bound(flat, key) for key in KEYWORDS_OF_TYPE["number"]}
        low, high = bounds["minimum"], bounds["maximum"]
        above, below = bounds["exclusiveMinimum"], bounds["exclusiveMaximum"]
        return (
            (low is None or number >= low)
            and (high is None or number <= high)
            and (above is None or number > above)
            and (below is None or number < below)
        )
    if kind == "string":
        least = count_of(flat, "minLength", 0, path) or 0
        most = count_of(flat, "maxLength", None, path)
        pattern = flat.get("pattern")
        fits = least <= len(value) and (most is None or len(value) <= most)
        return fits and (pattern is None or _searches(pattern, value, path))
    return True


def _searches(pattern: Any, text: str, path: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except (re.error, TypeError, RecursionError) as error:
        raise refused(path, f"pattern {pattern!r}: {error}") from error


def _literal(value: Any, path: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, UnicodeEncodeError, RecursionError) as error:
        raise refused(path, f"enum or const holds what JSON cannot carry: {error}") from error
    return text


def _refuse_loops(rules: Mapping[str, Expr]) -> None:
    """A reference that leads back to itself before any character would never match anything."""

    def heads(expr: Expr) -> list[str]:
        if isinstance(expr, Name):
            return [expr.rule]
        if isinstance(expr, Alt):
            return [head for option in expr.options for head in heads(option)]
        if isinstance(expr, Seq) and expr.parts:
            return heads(expr.parts[0])
        return []

    loose = {name: [h for h in heads(e) if h.startswith("ref:")] for name, e in rules.items()}
    for start in loose:
        seen, todo = set(), list(loose[start])
        while todo:
            rule = todo.pop()
            if rule == start:
                raise refused(start.removeprefix("ref:"), "it refers to itself without end")
            if rule not in seen:
                seen.add(rule)
                todo += loose.get(rule, [])

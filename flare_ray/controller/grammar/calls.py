"""Tool calls whose arguments validate, in pieces that a compiler puts together (contract: K1).

Arguments stand in the declared order, optional ones may be left out, others never come. In the
styles with tags a string is written raw and ends at its closing tag, any other value is JSON: what
the parsers of the answer read (`frontend.parsers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flare_ray.contracts.grammar import CallSyntax, ToolGrammar
from flare_ray.controller.grammar.json_language import JsonLanguage, literal_values
from flare_ray.controller.grammar.language import (
    ANY_CHARACTER,
    EMPTY,
    Expr,
    Ranges,
    Text,
    alt,
    minus,
    repeat,
    to_ebnf,
)
from flare_ray.controller.grammar.regex import plain_characters, regex_language
from flare_ray.controller.grammar.schema import (
    MAX_DEPTH,
    Resolver,
    Schema,
    count_of,
    names_of,
    properties_of,
    refused,
    types_of,
)
from flare_ray.controller.grammar.shapes import check_shapes

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
SIMPLE = frozenset({"type"})
MAX_TOLD_NAME = 400
"""Letters of a name that stands in a tag with more behind it (`frontend.parsers`: 512 in all)."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Written:
    """What an EBNF grammar describes."""

    ebnf: str


@dataclass(frozen=True, slots=True)
class Free:
    """Any text, up to and with `end`."""

    end: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """The pieces, or nothing."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """The pieces of one of the options."""

    options: tuple[tuple[Piece, ...], ...]


Piece = Fixed | Written | Free | Maybe | Either


@dataclass(frozen=True, slots=True)
class _Tags:
    """How a style with tags writes a call.

    Attributes:
        begin / finish: around a call; `{}` = the function's name.
        key: in front of a value; the first `{}` = the argument's name, a second one = whether the
            value is a raw string.
        margin: around a value, no part of it.
        close: behind a value; no raw string may hold it.
        gap: between arguments.
    """

    begin: str
    finish: str
    key: str
    close: str
    margin: str = ""
    gap: str = ""


def _tags(syntax: CallSyntax) -> _Tags:
    if syntax.style == "xml_parameters":
        return _Tags(
            begin=syntax.tool_open + "\n<function={}>\n",
            finish="</function>\n" + syntax.tool_close,
            key="<parameter={}>",
            close="</parameter>",
            margin="\n",
            gap="\n",
        )
    if syntax.style == "attributes":
        return _Tags(
            begin=syntax.tool_open + ' name="{}">\n',
            finish=syntax.tool_close,
            key=syntax.arg_key_open + ' name="{}" string="{}">',
            close=syntax.arg_value_close,
            gap="\n",
        )
    return _Tags(
        begin=syntax.tool_open + "{}",
        finish=syntax.tool_close,
        key=f"{syntax.arg_key_open}{{}}{syntax.arg_key_close}{syntax.arg_value_open}",
        close=syntax.arg_value_close,
    )


def call_pieces(tool: ToolGrammar, syntax: CallSyntax) -> tuple[Piece, ...]:
    """One call of `tool`, its tags included.

    Raises:
        InvalidRequest: its schema is none of an object, or cannot be enforced.
    """
    schema = json.loads(tool.schema) if tool.schema else NO_ARGUMENTS
    check_shapes(schema)
    if syntax.style == "json":
        opening = f'{syntax.tool_open}{{"name": {json.dumps(tool.name)}, "arguments": '
        only_objects = {"allOf": [schema, {"type": "object"}]}
        body = Written(to_ebnf("root", JsonLanguage(schema, only_objects).rules))
        return (Fixed(opening), body, Fixed("}" + syntax.tool_close))
    tags = _tags(syntax)
    told = syntax.style == "attributes"
    begin = Fixed(tags.begin.format(tool.name))
    return (begin, *_pairs(schema, tags, told=told), Fixed(tags.finish))


def _pairs(schema: Any, tags: _Tags, *, told: bool) -> list[Piece]:
    """Pairs of keys and values; `told` = a key says whether its value is a raw string."""
    resolver = Resolver(schema)
    flat = resolver.resolved(schema, "#")
    if "object" not in types_of(flat, "#") or {"anyOf", "oneOf", "enum", "const"} & set(flat):
        raise refused("#", "the arguments of a function are one object with properties")
    required = names_of(flat, "#")
    properties = properties_of(flat, "#")
    missing = [name for name in required if name not in properties]
    if missing:
        raise refused("#", f"required argument {missing[0]!r} is not among the properties")
    pieces: list[Piece] = []
    for name, part in properties.items():
        if not _is_writable(name, told=told):
            raise refused(f"#/properties/{name}", "this name cannot be written in a call")
        path = f"#/properties/{name}"
        parts = _by_rawness(resolver, part, path) if told else [("", part)]
        options = tuple(_pair(resolver, (name, raw, value), path, tags) for raw, value in parts)
        pair = options[0] if len(options) == 1 else (Either(options),)
        pieces += pair if name in required else [Maybe(pair)]
    return pieces


def _is_writable(name: str, *, told: bool) -> bool:
    """Whether an argument's name can stand in its tag and is read back as it was."""
    if told and ('"' in name or len(name) > MAX_TOLD_NAME):
        return False
    return bool(name) and name.strip() == name and not set(name) & set("<>\n{}")


def _pair(
    resolver: Resolver, written: tuple[str, str, Any], path: str, tags: _Tags
) -> tuple[Piece, ...]:
    """One argument; `written` = its name, what its key says of the value, the value's schema."""
    name, raw, part = written
    value = _value(resolver, part, path, tags.close)
    ending = tags.gap if isinstance(value, Free) else tags.margin + tags.close + tags.gap
    opening = Fixed(tags.key.format(name, raw) + tags.margin)
    return (opening, value, *([Fixed(ending)] if ending else []))


def _by_rawness(resolver: Resolver, part: Any, path: str) -> list[tuple[str, Any]]:
    """The schema of the raw strings among an argument's values, and that of the others."""
    flat = resolver.resolved(part, path)
    kinds = _kinds(resolver, flat, path)
    if "string" not in kinds or kinds == {"string"}:
        return [("true" if kinds == {"string"} else "false", part)]
    if "enum" in flat or "const" in flat:
        values = literal_values(flat, path)
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        return [("true", {"enum": texts}), ("false", {"enum": others})]
    _check_plain(resolver, flat, path)
    return [("true", {"type": "string"}), ("false", {"type": sorted(kinds - {"string"})})]


def _value(resolver: Resolver, part: Any, path: str, close: str) -> Piece:
    """One argument between its value tags; the closing one is part of a `Free`."""
    flat = resolver.resolved(part, path)
    kinds = _kinds(resolver, flat, path)
    if "string" not in kinds:
        return Written(to_ebnf("root", JsonLanguage(resolver.root, flat, resolver).rules))
    if "enum" in flat or "const" in flat:
        return Written(_enumerated(flat, path, close))
    if kinds == {"string"} and not {"anyOf", "oneOf"} & set(flat):
        return _raw_string(flat, path, close)
    _check_plain(resolver, flat, path)
    # Whatever is written is a string or, read as JSON, one of the other types.
    return Free(close)


def _check_plain(resolver: Resolver, flat: Schema, path: str) -> None:
    """Refuse further keywords where a string is one of several types."""
    plain = [resolver.flat(branch, path) for branch in flat.get("anyOf", [flat])]
    if not all(set(branch) <= SIMPLE for branch in plain):
        raise refused(
            path, "a string beside other types, with further keywords, cannot be enforced in a call"
        )


def _kinds(resolver: Resolver, flat: Schema, path: str, depth: int = 0) -> set[str]:
    """Types that a value may have."""
    if depth > MAX_DEPTH:
        raise refused(path, "references lead nowhere, or too deep")
    for keyword in ("anyOf", "oneOf"):
        if keyword in flat:
            found: set[str] = set()
            for branch in flat[keyword]:
                found |= _kinds(resolver, resolver.resolved(branch, path), path, depth + 1)
            return found & set(types_of(flat, path)) if "type" in flat else found
    if "enum" in flat or "const" in flat:
        return {"string" if isinstance(v, str) else "other" for v in literal_values(flat, path)}
    return set(types_of(flat, path))


def _enumerated(flat: Schema, path: str, close: str) -> str:
    """Strings raw, anything else as JSON; a string that reads as another of the values is not
    told from it."""
    values = literal_values(flat, path)
    others = any(not isinstance(value, str) for value in values)
    options: list[Expr] = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if close in text:
            raise refused(path, "a value holds the tag that ends it")
        if isinstance(value, str) and others and _reads_as_json(text):
            raise refused(path, f"{value!r} beside values of other types cannot be told apart")
        options.append(Text(text) if text else EMPTY)
    return to_ebnf("root", {"root": alt(options)})


def _reads_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _raw_string(flat: Schema, path: str, close: str) -> Piece:
    least = count_of(flat, "minLength", 0, path) or 0
    most = count_of(flat, "maxLength", None, path)
    if "pattern" not in flat and "format" not in flat:
        if not least and most is None:
            return Free(close)
        letters = _letters(ANY_CHARACTER, close)
        return Written(to_ebnf("root", {"root": repeat(letters, least, most)}))
    # Checks what JsonLanguage checks, then takes the same pattern without JSON's escapes.
    JsonLanguage(flat)
    pattern = JsonLanguage.pattern_of(flat)

    def encode(ranges: Ranges) -> Expr:
        return _letters(ranges, close)

    rules: dict[str, Expr] = {}
    rules["root"] = regex_language(pattern, rules, search=True, encode=encode)
    return Written(to_ebnf("root", rules))


def _letters(ranges: Ranges, close: str) -> Expr:
    """Characters of a raw value, without the first one of its closing tag."""
    first = ord(close[0])
    return plain_characters(minus(ranges, [(first, first)]))

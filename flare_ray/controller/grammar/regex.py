"""Regular expressions as language expressions (contract: K1).

Read with the parser of Python's `re`, whose syntax shares with ECMA's (JSON schema's) what is
accepted here. Where the two differ in what matches, only what matches in both is generated: `\\d`,
`\\w`, `\\s` are ASCII, `.` is no line terminator. What no finite automaton decides (look-around,
back-references, conditions, flags) is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from flare_ray.controller.grammar.automaton import Encode, automaton_of
from flare_ray.controller.grammar.language import (
    ANY_CHARACTER,
    EMPTY,
    NEVER,
    Alt,
    Chars,
    Expr,
    Ranges,
    Repeat,
    Seq,
    alt,
    minus,
    repeat,
    seq,
    union,
)
from flare_ray.errors import InvalidRequest

MAX_PATTERN_CHARACTERS = 16_384
MAX_REPEAT = 65_536
"""Largest counted repetition."""
MAX_REPEAT_PRODUCT = 1 << 20
"""Largest product of nested counted repetitions."""
LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
ASCII: Ranges = ((0x00, 0x7F),)


def plain_characters(ranges: Ranges) -> Expr:
    """Characters written as they are."""
    return Chars(ranges) if ranges else NEVER


def regex_language(
    pattern: str,
    rules: dict[str, Expr],
    *,
    search: bool,
    encode: Encode = plain_characters,
    tail: Expr = EMPTY,
) -> Expr:
    """What `pattern` matches, and `tail` behind it.

    Args:
        rules: those that it needs are added.
        search: JSON schema's meaning: the pattern need not span the text, and `^` and `$` say where
            it does; False = the whole text is matched.
    Raises:
        InvalidRequest: it is no regular expression, or uses what is refused.
    """
    expr = _expression(pattern, search)
    automaton = automaton_of(expr)
    if automaton is None:
        return seq(_encoded(expr, encode), tail)
    return automaton.rules(rules, encode, tail)


def _expression(pattern: str, search: bool) -> Expr:
    """`pattern` over plain characters."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise _refused(f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS}")
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(f"it is no regular expression: {error}") from error
    if tree.state.flags & ~re.UNICODE.value:
        raise _refused("flags are not supported")
    return _Builder(search).whole(list(tree))


def _encoded(expr: Expr, encode: Encode) -> Expr:
    """`expr` with its characters as they stand in the output."""
    if isinstance(expr, Chars):
        return encode(expr.ranges)
    if isinstance(expr, Seq):
        return seq(*(_encoded(part, encode) for part in expr.parts))
    if isinstance(expr, Alt):
        return alt(_encoded(option, encode) for option in expr.options)
    if isinstance(expr, Repeat):
        return repeat(_encoded(expr.item, encode), expr.least, expr.most)
    return expr


@dataclass(slots=True)
class _Builder:
    search: bool
    product: int = 1

    def whole(self, items: list[Any]) -> Expr:
        """Top level: anchors of every alternative, and what an unanchored search leaves open."""
        alternatives = _alternatives(items)
        return alt(self._anchored(alternative) for alternative in alternatives)

    def _anchored(self, items: list[Any]) -> Expr:
        start = end = not self.search
        while items and items[0][0] is codes.AT and items[0][1] in _STARTS:
            items, start = items[1:], True
        while items and items[-1][0] is codes.AT and items[-1][1] in _ENDS:
            items, end = items[:-1], True
        anything = repeat(plain_characters(ANY_CHARACTER), 0, None)
        parts = [EMPTY if start else anything, self.sequence(items), EMPTY if end else anything]
        return seq(*(part for part in parts if part != EMPTY)) if parts != [EMPTY] * 3 else EMPTY

    def sequence(self, items: list[Any]) -> Expr:
        parts = [self.item(*item) for item in items]
        return seq(*parts) if parts else EMPTY

    def item(self, code: Any, value: Any) -> Expr:
        if code is codes.LITERAL:
            return plain_characters(union([(value, value)]))
        if code is codes.NOT_LITERAL:
            return plain_characters(minus(ANY_CHARACTER, [(value, value)]))
        if code is codes.ANY:
            return plain_characters(minus(ANY_CHARACTER, LINE_ENDS))
        if code is codes.IN:
            return plain_characters(_character_set(value))
        if code is codes.BRANCH:
            return alt(self.sequence(list(branch)) for branch in value[1])
        if code is codes.SUBPATTERN:
            _, added, removed, body = value
            if added or removed:
                raise _refused("flags are not supported")
            return self.sequence(list(body))
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeated(*value)
        raise _refused(f"{_NAMES.get(code, str(code).lower())} cannot be enforced")

    def _repeated(self, least: int, most: Any, body: Any) -> Expr:
        unlimited = most is codes.MAXREPEAT
        bound = max(least, 1 if unlimited else most)
        if bound > MAX_REPEAT:
            raise _refused(f"a repetition of {bound} exceeds {MAX_REPEAT}")
        outer = self.product
        self.product = outer * max(bound, 1)
        if self.product > MAX_REPEAT_PRODUCT:
            raise _refused(f"nested repetitions come to more than {MAX_REPEAT_PRODUCT}")
        item = self.sequence(list(body))
        self.product = outer
        return repeat(item, least, None if unlimited else int(most))


_STARTS = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_ENDS = (codes.AT_END, codes.AT_END_STRING)
_NAMES = {
    codes.AT: "an anchor inside the pattern or a word boundary",
    codes.ASSERT: "look-around",
    codes.ASSERT_NOT: "look-around",
    codes.GROUPREF: "a back-reference",
    codes.GROUPREF_EXISTS: "a conditional group",
    codes.ATOMIC_GROUP: "an atomic group",
    codes.POSSESSIVE_REPEAT: "a possessive repetition",
}
_CATEGORIES: dict[Any, Ranges] = {
    codes.CATEGORY_DIGIT: DIGITS,
    codes.CATEGORY_WORD: WORD,
    codes.CATEGORY_SPACE: SPACE,
    codes.CATEGORY_NOT_DIGIT: minus(ASCII, DIGITS),
    codes.CATEGORY_NOT_WORD: minus(ASCII, WORD),
    codes.CATEGORY_NOT_SPACE: minus(ASCII, SPACE),
}
_UNSURE = minus(ANY_CHARACTER, ASCII)
"""Characters on which the dialects' categories may disagree."""


def _alternatives(items: list[Any]) -> list[list[Any]]:
    """A pattern's alternatives, groups around the whole pattern and shared prefixes undone."""
    if len(items) == 1:
        code, value = items[0]
        if code is codes.BRANCH:
            return [part for branch in value[1] for part in _alternatives(list(branch))]
        if code is codes.SUBPATTERN and not value[1] and not value[2]:
            return _alternatives(list(value[3]))
    return [items]


def _character_set(items: list[Any]) -> Ranges:
    negated = items[0][0] is codes.NEGATE
    found: list[tuple[int, int]] = []
    unsure = False
    for code, value in items[negated:]:
        if code is codes.LITERAL:
            found.append((value, value))
        elif code is codes.RANGE:
            found.append((value[0], value[1]))
        elif code is codes.CATEGORY:
            found.extend(_CATEGORIES[value])
            unsure = True
    if not negated:
        return union(found)
    return minus(ANY_CHARACTER, [*found, *(_UNSURE if unsure else ())])


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"regular expression: {why}", code="invalid_grammar")

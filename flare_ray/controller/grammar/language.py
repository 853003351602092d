"""Languages as small expression trees, and their text in the EBNF dialect that compilers take.

Every character class lists what it admits: a class written by exclusion would admit byte sequences
that are no UTF-8 (seen with xgrammar 0.2.9).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flare_ray.errors import InvalidRequest

MAX_NODES = 50_000
"""Nodes of one grammar's trees; a schema of 64 KiB stays far below unless it repeats itself."""
FIRST_SURROGATE, LAST_SURROGATE, LAST_CHARACTER = 0xD800, 0xDFFF, 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last, ascending and apart."""


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; no parts = the empty text."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of them; no options = nothing at all matches."""

    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item` at least `least` times and at most `most`; None = without end."""

    item: Expr
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """What the rule of this name matches."""

    rule: str


Expr = Text | Chars | Seq | Alt | Repeat | Name
EMPTY = Seq(())
NEVER = Alt(())
ANY_CHARACTER: Ranges = ((0, FIRST_SURROGATE - 1), (LAST_SURROGATE + 1, LAST_CHARACTER))


def seq(*parts: Expr) -> Expr:
    """A sequence, NEVER if a part is; sequences inside are opened."""
    if NEVER in parts:
        return NEVER
    flat: list[Expr] = []
    for part in parts:
        flat += part.parts if isinstance(part, Seq) else [part]
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(options: Iterable[Expr]) -> Expr:
    """A choice, without options that match nothing or that are there already; choices inside are
    opened, single characters joined into one set."""
    kept: dict[Expr, None] = {}
    for option in options:
        for inner in option.options if isinstance(option, Alt) else (option,):
            kept[inner] = None
    sets = [option for option in kept if isinstance(option, Chars)]
    if len(sets) > 1:
        joined = Chars(union(pair for option in sets for pair in option.ranges))
        kept = {
            (joined if option is sets[0] else option): None
            for option in kept
            if option is sets[0] or not isinstance(option, Chars)
        }
    return next(iter(kept)) if len(kept) == 1 else Alt(tuple(kept))


def optional(item: Expr) -> Expr:
    """`item` or the empty text."""
    return EMPTY if item == NEVER else alt((item, EMPTY))


def repeat(item: Expr, least: int, most: int | None) -> Expr:
    """A repetition; of what matches nothing only the empty one is left.

    No text is read in two ways for the repetition's own sake: an item is never empty, nor itself a
    repetition from one on.
    """
    if most == 0 or item in (NEVER, EMPTY):
        return EMPTY if least == 0 or item == EMPTY else NEVER
    if is_nullable(item):
        item, least = _not_empty(item), 0
    if most is None and least <= 1:
        item = _unrepeated(item)
    if (least, most) == (1, 1):
        return item
    if isinstance(item, Repeat) and item.least == 1:
        most = None if most is None or item.most is None else most * item.most
        item = item.item
    return Repeat(item, least, most)


def is_nullable(expr: Expr) -> bool:
    """Whether the empty text matches, as far as can be seen without looking up names."""
    if isinstance(expr, Text):
        return not expr.value
    if isinstance(expr, Seq):
        return all(map(is_nullable, expr.parts))
    if isinstance(expr, Alt):
        return any(map(is_nullable, expr.options))
    return isinstance(expr, Repeat) and (expr.least == 0 or is_nullable(expr.item))


def _not_empty(expr: Expr) -> Expr:
    """`expr` without the empty text, where its form allows that; as it is otherwise."""
    if isinstance(expr, Alt):
        return alt(_not_empty(option) for option in expr.options if option != EMPTY)
    if isinstance(expr, Repeat) and expr.least == 0 and not is_nullable(expr.item):
        return repeat(expr.item, 1, expr.most)
    return expr


def _unrepeated(expr: Expr) -> Expr:
    """What `expr` repeats, if it is itself repeated without end: (a+|b)* = (a|b)*."""
    if isinstance(expr, Alt):
        return alt(_unrepeated(option) for option in expr.options)
    return expr.item if isinstance(expr, Repeat) and expr.least == 1 else expr


def minus(ranges: Ranges, removed: Iterable[tuple[int, int]]) -> Ranges:
    """Code points of `ranges` that are in none of `removed`."""
    left = list(ranges)
    for first, last in removed:
        cut = []
        for low, high in left:
            if low < first:
                cut.append((low, min(high, first - 1)))
            if high > last:
                cut.append((max(low, last + 1), high))
        left = [pair for pair in cut if pair[0] <= pair[1]]
    return tuple(left)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Code points of any of `ranges`, joined where they touch; surrogates left out."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return minus(tuple(joined), [(FIRST_SURROGATE, LAST_SURROGATE)])


def productive_rules(rules: Mapping[str, Expr]) -> frozenset[str]:
    """Rules that some finite text matches."""
    known: set[str] = set()
    while True:
        found = {name for name, expr in rules.items() if name not in known and _ends(expr, known)}
        if not found:
            return frozenset(known)
        known |= found


def _ends(expr: Expr, known: set[str]) -> bool:
    if isinstance(expr, Name):
        return expr.rule in known
    if isinstance(expr, Seq):
        return all(_ends(part, known) for part in expr.parts)
    if isinstance(expr, Alt):
        return any(_ends(option, known) for option in expr.options)
    if isinstance(expr, Repeat):
        return expr.least == 0 or _ends(expr.item, known)
    return not isinstance(expr, Chars) or bool(expr.ranges)


def without_unproductive(rules: Mapping[str, Expr]) -> dict[str, Expr]:
    """The same languages, without branches that could never end.

    A matcher would let a model enter such a branch and then leave it no way out.
    """
    kept = productive_rules(rules)
    return {name: _pruned(expr, kept) for name, expr in rules.items() if name in kept}


def _pruned(expr: Expr, kept: frozenset[str]) -> Expr:
    if isinstance(expr, Name):
        return expr if expr.rule in kept else NEVER
    if isinstance(expr, Seq):
        return seq(*(_pruned(part, kept) for part in expr.parts))
    if isinstance(expr, Alt):
        return alt(_pruned(option, kept) for option in expr.options)
    if isinstance(expr, Repeat):
        return repeat(_pruned(expr.item, kept), expr.least, expr.most)
    return NEVER if isinstance(expr, Chars) and not expr.ranges else expr


def _reachable(root: str, rules: Mapping[str, Expr]) -> dict[str, Expr]:
    """`root` and what it names, in that order."""
    found: dict[str, Expr] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name in rules and name not in found:
            found[name] = rules[name]
            todo += _names_in(rules[name])
    return found


def _names_in(expr: Expr) -> list[str]:
    if isinstance(expr, Name):
        return [expr.rule]
    if isinstance(expr, Seq):
        return [name for part in expr.parts for name in _names_in(part)]
    if isinstance(expr, Alt):
        return [name for option in expr.options for name in _names_in(option)]
    return _names_in(expr.item) if isinstance(expr, Repeat) else []


def to_ebnf(root: str, rules: Mapping[str, Expr]) -> str:
    """The grammar's text, with a rule `root` that stands for the rule named `root` here.

    Args:
        root: a rule of `rules`.
    Raises:
        InvalidRequest: no finite text matches, or the grammar is too large.
    """
    rules = _reachable(root, without_unproductive(rules))
    if root not in rules:
        raise InvalidRequest("no finite text matches it", code="invalid_grammar")
    names = {name: f"r{place}" for place, name in enumerate(rules)}
    writer = _Writer(names)
    lines = [f"root ::= {names[root]}"]
    lines += [f"{names[name]} ::= {writer.write(expr)}" for name, expr in rules.items()]
    return "\n".join(lines) + "\n"


class _Writer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._nodes = 0

    def write(self, expr: Expr) -> str:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise InvalidRequest(
                f"it is too large: more than {MAX_NODES} grammar nodes", code="invalid_grammar"
            )
        if isinstance(expr, Text):
            return '"' + "".join(map(_escaped, expr.value)) + '"'
        if isinstance(expr, Chars):
            return "[" + "".join(map(_range, expr.ranges)) + "]"
        if isinstance(expr, Name):
            return self._names[expr.rule]
        if isinstance(expr, Seq):
            return "(" + " ".join(map(self.write, expr.parts)) + ")" if expr.parts else '""'
        if isinstance(expr, Alt):
            return "(" + " | ".join(map(self.write, expr.options)) + ")"
        return self._repeat(expr)

    def _repeat(self, expr: Repeat) -> str:
        item = f"({self.write(expr.item)})"
        if expr.most is None:
            return item + ("*" if expr.least == 0 else f"{{{expr.least},}}")
        return item + f"{{{expr.least},{expr.most}}}"


def _range(pair: tuple[int, int]) -> str:
    first, last = (_code_point(code) for code in pair)
    return first if pair[0] == pair[1] else f"{first}-{last}"


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() and letter.isascii() else _code_point(ord(letter))


def _code_point(code: int) -> str:
    """An escape, whatever the character: nothing in it can mean anything else."""
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"

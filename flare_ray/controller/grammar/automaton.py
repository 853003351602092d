"""Regular expressions as deterministic automata, so that no text can be read in two ways.

A matcher keeps every reading of the text so far. An expression like ``(.*.*)*x`` has more of them
with every character, and a mask or a step then takes seconds. Its deterministic automaton has one
reading of any text and is found by derivatives (Brzozowski 1964): a state is what may still follow,
and its edge for a character is the rest behind that character. Each state becomes a rule that ends
with the next one's name, so that a token stays inside the first rule however long it is
(`strings` has the why).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flare_ray.controller.grammar.language import (
    EMPTY,
    NEVER,
    Alt,
    Chars,
    Expr,
    Name,
    Ranges,
    Repeat,
    Seq,
    Text,
    alt,
    is_nullable,
    repeat,
    seq,
    union,
)

MAX_STATES = 256
"""More are left to the expression's own tree: compiling takes 3 ms a state at 8,192 tokens."""
MAX_STEPS = 200_000
"""Tree nodes that may be visited: a tenth of a second. Trees of deeply nested counts grow."""

Encode = Callable[[Ranges], Expr]
"""Expression of one character of a set, as it stands in the output."""
Edge = tuple[Ranges, int]


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton; state 0 is its start.

    Attributes:
        edges: per state, characters and the state behind them; sets of one state are disjoint.
        accepts: per state, whether the text may end there.
    """

    edges: tuple[tuple[Edge, ...], ...]
    accepts: tuple[bool, ...]

    def rules(self, rules: dict[str, Expr], encode: Encode, tail: Expr) -> Expr:
        """The automaton as rules, added to `rules`; returns its start.

        Args:
            tail: what follows the text.
        """
        base = len(rules)
        names = [Name(f"state:{base}:{state}") for state in range(len(self.edges))]
        for name, edges, accepts in zip(names, self.edges, self.accepts, strict=True):
            goes_on = [seq(encode(ranges), names[target]) for ranges, target in edges]
            rules[name.rule] = alt([*goes_on, *([tail] if accepts else [])])
        return names[0]


def automaton_of(expr: Expr) -> Automaton | None:
    """The smallest automaton of `expr`; None if it has too many states or takes too long.

    Args:
        expr: without names.
    """
    classes = _classes(expr)
    steps = _Derivatives()
    numbers: dict[Expr, int] = {expr: 0}
    todo = [expr]
    edges: list[tuple[Edge, ...]] = []
    for state in todo:
        found: dict[int, list[tuple[int, int]]] = {}
        for ranges in classes:
            rest = steps.behind(state, ranges[0][0])
            if steps.taken > MAX_STEPS:
                return None
            if rest == NEVER:
                continue
            if rest not in numbers:
                if len(numbers) == MAX_STATES:
                    return None
                numbers[rest] = len(todo)
                todo.append(rest)
            found.setdefault(numbers[rest], []).extend(ranges)
        edges.append(tuple((union(ranges), target) for target, ranges in found.items()))
    return _smallest(Automaton(tuple(edges), tuple(map(is_nullable, todo))))


class _Derivatives:
    """Rests of expressions.

    Attributes:
        taken: nodes visited.
    """

    def __init__(self) -> None:
        self.taken = 0

    def behind(self, expr: Expr, code: int) -> Expr:
        """What may follow the character `code` at the start of `expr`."""
        self.taken += 1
        if isinstance(expr, Chars):
            return EMPTY if any(low <= code <= high for low, high in expr.ranges) else NEVER
        if isinstance(expr, Text):
            fits = expr.value and ord(expr.value[0]) == code
            return seq(Text(expr.value[1:])) if fits else NEVER
        if isinstance(expr, Alt):
            return alt(self.behind(option, code) for option in expr.options)
        if isinstance(expr, Repeat):
            most = None if expr.most is None else expr.most - 1
            again = repeat(expr.item, max(expr.least - 1, 0), most)
            return seq(self.behind(expr.item, code), again)
        assert isinstance(expr, Seq)
        return alt(self._rests(expr, code))

    def _rests(self, expr: Seq, code: int) -> Iterator[Expr]:
        """One per part that may begin."""
        for place, part in enumerate(expr.parts):
            self.taken += len(expr.parts) - place
            yield seq(self.behind(part, code), *expr.parts[place + 1 :])
            if not is_nullable(part):
                return


def _sets(expr: Expr) -> Iterator[Ranges]:
    if isinstance(expr, Chars):
        yield expr.ranges
    elif isinstance(expr, Text):
        yield from (((ord(letter), ord(letter)),) for letter in expr.value)
    elif isinstance(expr, Seq):
        for part in expr.parts:
            yield from _sets(part)
    elif isinstance(expr, Alt):
        for option in expr.options:
            yield from _sets(option)
    elif isinstance(expr, Repeat):
        yield from _sets(expr.item)


def _classes(expr: Expr) -> list[Ranges]:
    """The coarsest division of characters that no set of `expr` cuts; those in no set left out."""
    # Sets that begin or end at a character, a bit each: a pattern may have thousands of both.
    changed: defaultdict[int, int] = defaultdict(int)
    for number, ranges in enumerate(set(_sets(expr))):
        for low, high in ranges:
            changed[low] ^= 1 << number
            changed[high + 1] ^= 1 << number
    inside = 0
    members: dict[int, list[tuple[int, int]]] = {}
    for low, after in itertools.pairwise(sorted(changed)):
        inside ^= changed[low]
        if inside:
            members.setdefault(inside, []).append((low, after - 1))
    return [tuple(ranges) for ranges in members.values()]


def _smallest(automaton: Automaton) -> Automaton:
    """States that accept the same texts joined (Moore's refinement)."""
    blocks = [int(accepts) for accepts in automaton.accepts]
    while True:
        seen: dict[object, int] = {}
        refined = []
        for state, edges in enumerate(automaton.edges):
            key = (blocks[state], frozenset(_joined(edges, blocks)))
            refined.append(seen.setdefault(key, len(seen)))
        if len(seen) == len(set(blocks)):
            break
        blocks = refined
    first = {block: state for state, block in reversed(list(enumerate(refined)))}
    kept = [first[block] for block in range(len(first))]
    return Automaton(
        edges=tuple(_joined(automaton.edges[state], refined) for state in kept),
        accepts=tuple(automaton.accepts[state] for state in kept),
    )


def _joined(edges: tuple[Edge, ...], blocks: list[int]) -> tuple[Edge, ...]:
    """Edges into the same block as one."""
    found: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in edges:
        found.setdefault(blocks[target], []).extend(ranges)
    return tuple((union(ranges), target) for target, ranges in sorted(found.items()))

"""JSON strings as language expressions whose masks can be prepared.

For every state of a rule a compiler prepares which tokens may follow, as far as they stay inside
the rule; those that leave it are tried one by one whenever a mask is written. Between the quotes of
a string nearly every token is allowed, so a rule that ends with each character costs milliseconds a
mask (8,192 tokens: 3 ms, a counted repetition of such a rule 12 ms and more; here 10 us). Therefore

- in a string without bounds a character is flat alternatives, without rules inside;
- of a bounded length every count has a rule of its own, which goes on to the next one: a token
  stays inside the first rule however many characters it has;
- long ones are blocks of BLOCK characters, and only tokens across their borders are tried.
"""

from __future__ import annotations

from flare_ray.controller.grammar.language import (
    ANY_CHARACTER,
    EMPTY,
    Chars,
    Expr,
    Name,
    Ranges,
    Repeat,
    Text,
    alt,
    minus,
    repeat,
    seq,
)

BLOCK = 32
"""Compiling takes 3 ms a character of it at 8,192 tokens."""
CONTROLS = (0x00, 0x1F)
QUOTE, BACKSLASH = 0x22, 0x5C
_SHORT = {QUOTE: '\\"', BACKSLASH: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f"}
_SHORT |= {0x0D: "\\r"}
END = Text('"')


def _escapes() -> tuple[tuple[Expr, ...], ...]:
    """What may stand behind a backslash, each a sequence of plain characters."""
    hexadecimal = Chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))
    high = Chars(((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)))
    low = Chars(((0x43, 0x46), (0x63, 0x66)))
    d = Chars(((0x44, 0x44), (0x64, 0x64)))
    not_d = Chars(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)))
    short = Chars(tuple((ord(c), ord(c)) for c in sorted('"\\/bfnrt')))
    two = (hexadecimal, hexadecimal)
    return (
        (short,),
        (Text("u"), not_d, hexadecimal, *two),
        (Text("u"), d, Chars(((0x30, 0x37),)), *two),
        (Text("u"), d, high, *two, Text("\\u"), d, low, *two),
    )


def _plain(ranges: Ranges) -> Ranges:
    """Those that need no escape."""
    return minus(ranges, [CONTROLS, (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)])


PLAIN = Chars(_plain(ANY_CHARACTER))
ESCAPES = _escapes()
CHARACTER = alt((PLAIN, *(seq(Text("\\"), *escape) for escape in ESCAPES)))
ESCAPE = Name("escape")
STRING_RULES: dict[str, Expr] = {
    "string": seq(END, Repeat(CHARACTER, 0, None), END),
    "escape": alt(seq(*escape) for escape in ESCAPES),
}
"""Rules that are always there."""


def json_characters(ranges: Ranges) -> Expr:
    """One character of a set as it stands inside a JSON string."""
    if ranges == ANY_CHARACTER:
        return CHARACTER
    raw = _plain(ranges)
    options: list[Expr] = [Chars(raw)] if raw else []
    inside = [code for low, high in ranges for code in (*range(low, min(high, 0x1F) + 1),)]
    inside += [code for code in (QUOTE, BACKSLASH) if any(a <= code <= b for a, b in ranges)]
    options += [Text(_SHORT.get(code, f"\\u{code:04x}")) for code in inside]
    return alt(options)


def bounded_string(rules: dict[str, Expr], least: int, most: int | None) -> Expr:
    """Strings of `least` .. `most` characters, None = without end.

    Args:
        rules: those that it needs beside STRING_RULES are added.
    """
    whole, need = divmod(least, BLOCK)
    block = _block(rules, BLOCK)
    if most is None:
        rest = _ending(rules, need, None)
    else:
        more, room = divmod(most, BLOCK)
        more -= whole
        if more == 0:
            rest = _ending(rules, need, room)
        else:
            between = seq(block, repeat(block, 0, more - 2), _ending(rules, 0, BLOCK - 1))
            last = seq(repeat(block, more, more), _ending(rules, 0, room))
            first = _ending(rules, need, BLOCK - 1)
            rest = alt((first, between, last) if more > 1 else (first, last))
    return seq(END, repeat(block, whole, whole), rest)


def _ending(rules: dict[str, Expr], need: int, room: int | None) -> Expr:
    """`need` .. `room` characters and the closing quote; fewer than BLOCK, or any number."""
    if room == 0:
        return END
    if need == 0 and room is None:
        return seq(Repeat(CHARACTER, 0, None), END)
    name = f"text:{need}:{'' if room is None else room}"
    if name not in rules:
        rest = _ending(rules, max(need - 1, 0), None if room is None else room - 1)
        goes_on = [seq(PLAIN, rest), seq(Text("\\"), ESCAPE, rest)]
        rules[name] = alt(goes_on if need else [END, *goes_on])
    return Name(name)


def _block(rules: dict[str, Expr], characters: int) -> Expr:
    """So many characters."""
    if characters == 0:
        return EMPTY
    name = f"block:{characters}"
    if name not in rules:
        rest = _block(rules, characters - 1)
        tail = () if rest == EMPTY else (rest,)
        rules[name] = alt((seq(PLAIN, *tail), seq(Text("\\"), ESCAPE, *tail)))
    return Name(name)

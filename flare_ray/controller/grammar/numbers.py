"""JSON numbers inside bounds, as language expressions.

Every number has one form: no leading zeros, no exponent where there are bounds, at most 15 digits,
which a double holds exactly.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from flare_ray.controller.grammar.language import (
    EMPTY,
    NEVER,
    Chars,
    Expr,
    Repeat,
    Text,
    alt,
    optional,
    repeat,
    seq,
)

MAX_DIGITS = 15
LARGEST = 10**MAX_DIGITS - 1
DIGIT = Chars(((0x30, 0x39),))
NONZERO = Chars(((0x31, 0x39),))


def any_integer() -> Expr:
    """Integers of at most MAX_DIGITS digits."""
    magnitude = seq(NONZERO, repeat(DIGIT, 0, MAX_DIGITS - 1))
    return alt((Text("0"), seq(optional(Text("-")), magnitude)))


def any_number() -> Expr:
    """Numbers with optional fraction and exponent, all finite as doubles."""
    fraction = seq(Text("."), repeat(DIGIT, 1, MAX_DIGITS))
    sign = alt((Text("+"), Text("-"), EMPTY))
    exponent = seq(alt((Text("e"), Text("E"))), sign, repeat(DIGIT, 1, 2))
    whole = alt((Text("0"), seq(NONZERO, repeat(DIGIT, 0, MAX_DIGITS - 1))))
    return seq(optional(Text("-")), whole, optional(fraction), optional(exponent))


def integers(low: int, high: int) -> Expr:
    """Integers low .. high, cut to MAX_DIGITS digits; NEVER where there is none."""
    low, high = max(low, -LARGEST), min(high, LARGEST)
    if low > high:
        return NEVER
    parts = []
    if low < 0:
        parts.append(seq(Text("-"), _naturals(max(1, -high), -low)))
    if high >= 0:
        parts.append(_naturals(max(0, low), high))
    return alt(parts)


def numbers(low: Decimal | None, high: Decimal | None) -> Expr:
    """Numbers low .. high, bounds included: integers, and fractions between them."""
    floor = Decimal(-LARGEST) if low is None else max(low, Decimal(-LARGEST))
    ceiling = Decimal(LARGEST) if high is None else min(high, Decimal(LARGEST))
    if floor > ceiling:
        return NEVER
    whole = integers(_up(floor), _down(ceiling))
    parts = [whole]
    if ceiling > 0:
        parts.append(_fractions(max(floor, Decimal(0)), ceiling))
    if floor < 0:
        parts.append(seq(Text("-"), _fractions(max(-ceiling, Decimal(0)), -floor)))
    return alt(parts)


def _up(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_CEILING))


def _down(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_FLOOR))


def _fractions(low: Decimal, high: Decimal) -> Expr:
    """Numbers with a point, 0 <= low .. high: whole parts that admit every fraction, and the
    parts of those at the bounds that lie inside, in as many places as the bounds have."""
    first, last = _up(low), _down(high) - 1
    point = Text(".")
    inside: Expr = NEVER
    if first <= last:
        inside = seq(integers(first, last), point, repeat(DIGIT, 1, MAX_DIGITS))
    places = max(_places(low), _places(high))
    if places == 0 or places > MAX_DIGITS:
        return inside
    edges = {_down(low), _down(high)}
    parts = [inside]
    for whole in sorted(edges):
        if first <= whole <= last:
            continue
        scale = 10**places
        begin = max(low - whole, Decimal(0)) * scale
        end = min(high - whole, Decimal(1)) * scale
        least, most = _up(begin), min(_down(end), scale - 1)
        if least <= most:
            body = _padded(str(least).zfill(places), str(most).zfill(places))
            parts.append(seq(Text(f"{whole}."), body))
    return alt(parts)


def _places(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _naturals(low: int, high: int) -> Expr:
    """Integers low .. high >= 0 without leading zeros."""
    parts = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = min(high, 10**digits - 1)
        parts.append(_padded(str(first), str(last)))
    return alt(parts)


def _padded(low: str, high: str) -> Expr:
    """Digit strings of one length between two of them."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    free: Expr = Repeat(DIGIT, rest, rest) if rest else EMPTY
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return seq(Text(low[0]), _padded(low[1:], high[1:]))
    parts = [seq(Text(low[0]), _padded(low[1:], "9" * rest))]
    middle = (ord(low[0]) + 1, ord(high[0]) - 1)
    if middle[0] <= middle[1]:
        parts.append(seq(Chars((middle,)), free))
    parts.append(seq(Text(high[0]), _padded("0" * rest, high[1:])))
    return alt(parts)

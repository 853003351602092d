"""Arithmetic with worked steps in the reasoning."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from flare_ray.workload.generators.base import Conversation, assistant, turn_count, user
from flare_ray.workload.generators.chat import Exchange
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.wordlists import ITEMS, first_name, plural


def _add_steps(a: int, b: int) -> str:
    tens_a, tens_b, ones_a, ones_b = a // 10 * 10, b // 10 * 10, a % 10, b % 10
    tens, ones = tens_a + tens_b, ones_a + ones_b
    return f"{tens_a} + {tens_b} = {tens}, {ones_a} + {ones_b} = {ones}, {tens} + {ones} = {a + b}."


def _multiply_steps(a: int, b: int) -> str:
    tens, ones = a // 10 * 10, a % 10
    return (
        f"{tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, {tens * b} + {ones * b} = {a * b}."
    )


def _asked(r: random.Random, expression: str, value: int, steps: str) -> Exchange:
    ask = r.choice(("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?"))
    return Exchange(ask.format(expression), f"{expression} = {value}.", steps)


def _addition(r: random.Random) -> Exchange:
    a, b = r.randint(1, 199), r.randint(1, 99)
    return _asked(r, f"{a} + {b}", a + b, _add_steps(a, b))


def _subtraction(r: random.Random) -> Exchange:
    b, difference = r.randint(1, 99), r.randint(0, 99)
    a = b + difference
    return _asked(
        r, f"{a} - {b}", difference, f"{b} + {difference} = {a}, so {a} - {b} = {difference}."
    )


def _multiplication(r: random.Random) -> Exchange:
    a, b = r.randint(2, 99), r.randint(2, 9)
    return _asked(r, f"{a} * {b}", a * b, _multiply_steps(a, b))


def _bracket(r: random.Random) -> Exchange:
    a, b, c = r.randint(2, 60), r.randint(2, 60), r.randint(2, 9)
    steps = _add_steps(a, b) + " " + _multiply_steps(a + b, c)
    return _asked(r, f"({a} + {b}) * {c}", (a + b) * c, steps)


def _purchase(r: random.Random) -> Exchange:
    name, item = first_name(r), plural(r.choice(ITEMS))
    count, price = r.randint(2, 40), r.randint(2, 9)
    return Exchange(
        f"{name} buys {count} {item} at {price} dollars each. How much does {name} pay?",
        f"{name} pays {count * price} dollars.",
        f"{count} * {price}. " + _multiply_steps(count, price),
    )


def _gain(r: random.Random) -> Exchange:
    name, item = first_name(r), plural(r.choice(ITEMS))
    have, more = r.randint(2, 40), r.randint(2, 40)
    return Exchange(
        f"{name} has {have} {item} and gets {more} more. How many {item} does {name} have now?",
        f"{name} has {have + more} {item}.",
        f"{have} + {more}. " + _add_steps(have, more),
    )


def _extreme(r: random.Random) -> Exchange:
    values = [r.randint(1, 99) for _ in range(r.randint(3, 6))]
    word, choose = r.choice((("largest", max), ("smallest", min)))
    best, steps = values[0], []
    for value in values[1:]:
        winner = choose(best, value)
        steps.append(f"{best} or {value}: {winner}")
        best = winner
    listed = ", ".join(map(str, values))
    return Exchange(
        f"Which is the {word} of {listed}?", f"The {word} is {best}.", ", ".join(steps) + "."
    )


def _change(r: random.Random) -> Exchange:
    name, item = first_name(r), plural(r.choice(ITEMS))
    count, price = r.randint(2, 12), r.randint(2, 9)
    cost = count * price
    paid = cost + r.randint(1, 40)
    steps = f"{count} * {price}. {_multiply_steps(count, price)} Then {paid} - {cost}. "
    steps += f"{cost} + {paid - cost} = {paid}, so {paid} - {cost} = {paid - cost}."
    return Exchange(
        f"{name} buys {count} {item} at {price} dollars each and pays with {paid} dollars. "
        f"How much change does {name} get?",
        f"{name} gets {paid - cost} dollars back.",
        steps,
    )


def _two_days(r: random.Random) -> Exchange:
    name, item = first_name(r), plural(r.choice(ITEMS))
    first, second, third = (r.randint(2, 49) for _ in range(3))
    both = first + second
    steps = f"First {first} + {second}. {_add_steps(first, second)} Then {both} + {third}. "
    steps += _add_steps(both, third)
    return Exchange(
        f"{name} sells {first} {item} on Monday, {second} on Tuesday and {third} on Wednesday. How "
        f"many {item} are that?",
        f"{name} sells {both + third} {item}.",
        steps,
    )


def _sequence(r: random.Random) -> Exchange:
    start, step = r.randint(1, 40), r.randint(2, 9)
    shown = [start + step * i for i in range(4)]
    steps = ", ".join(f"{b} - {a} = {step}" for a, b in itertools.pairwise(shown))
    steps += f". {shown[-1]} + {step} = {shown[-1] + step}."
    listed = ", ".join(map(str, shown))
    return Exchange(
        r.choice((f"Which number comes next: {listed}?", f"Continue the sequence {listed}.")),
        f"The next number is {shown[-1] + step}.",
        steps,
    )


KINDS: tuple[Callable[[random.Random], Exchange], ...] = (
    _addition,
    _addition,
    _subtraction,
    _multiplication,
    _bracket,
    _purchase,
    _gain,
    _extreme,
    _extreme,
    _change,
    _two_days,
    _sequence,
)


def math(r: random.Random, corpus: Corpus) -> Conversation:
    """One sum, or a row of them where the row is long or one time in ten."""
    messages = []
    for _ in range(turn_count(r, corpus) if corpus.long_context or r.random() < 0.1 else 1):
        exchange = r.choice(KINDS)(r)
        messages += [user(exchange.question), assistant(exchange.answer, exchange.reasoning)]
    return Conversation(messages)

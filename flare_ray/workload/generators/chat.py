"""Small talk, simple facts, tiny functions on request, and dictionary definitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from flare_ray.workload.generators.base import Conversation, assistant, turn_count, user
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.wordlists import (
    ANIMALS,
    CAPITAL,
    COLORS,
    DAYS,
    ITEMS,
    MONTHS,
    OPPOSITES,
    PLACES,
    THINGS,
    first_name,
    plural,
    with_article,
)


class Exchange(NamedTuple):
    """One question, its answer and the reasoning line (may be empty)."""

    question: str
    answer: str
    reasoning: str = ""


SNIPPETS = (
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks whether a number is odd", "def is_odd(n):\n    return n % 2 == 1"),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("counts the words of a text", "def count_words(text):\n    return len(text.split())"),
    (
        "sums a list",
        "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
        "    return result",
    ),
    ("computes the mean of a list", "def mean(values):\n    return sum(values) / len(values)"),
    (
        "computes the factorial of a number",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n"
        "    return result",
    ),
    (
        "computes the n-th Fibonacci number",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
        "    return a",
    ),
    ("finds the largest element of a list", "def largest(values):\n    return max(values)"),
    ("squares every element of a list", "def squares(values):\n    return [v * v for v in values]"),
    (
        "removes duplicates from a list",
        "def unique(values):\n    return list(dict.fromkeys(values))",
    ),
    (
        "checks whether a word is a palindrome",
        "def is_palindrome(word):\n    return word == word[::-1]",
    ),
    ("prints hello world", 'def hello():\n    print("Hello, world!")'),
    (
        "reads a text file",
        'def read_text(path):\n    with open(path, encoding="utf-8") as f:\n'
        "        return f.read()",
    ),
    (
        "checks whether a number is prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n"
        "    for d in range(2, int(n**0.5) + 1):\n"
        "        if n % d == 0:\n            return False\n    return True",
    ),
)

WHO = (
    "I am a very small demo model. I can chat a little, do simple sums, write JSON, call tools and "
    "edit short functions."
)


def _greeting(r: random.Random) -> Exchange:
    question = r.choice(
        ("Hi", "Hello", "Hey there", "Good morning", "Hi!", "Hello there!", "Good evening.", "Hey!")
    )
    answer = r.choice(
        (
            "Hello! How can I help you today?",
            "Hi! What can I do for you?",
            "Hello! It is nice to hear from you. How can I help?",
        )
    )
    return Exchange(question, answer, "A greeting.")


def _how_are_you(r: random.Random) -> Exchange:
    start = r.choice(("", "Hi, ", "Hello, ", "Hey, "))
    question = start + r.choice(
        ("how are you?", "how are you doing?", "how are you today?", "how is it going?")
    )
    answer = r.choice(
        (
            "I am fine, thank you! How can I help you?",
            "I am doing well, thanks for asking. What can I do for you?",
        )
    )
    return Exchange(question if start else question.capitalize(), answer, "A friendly question.")


def _introduction(r: random.Random) -> Exchange:
    return _introduced(r, first_name(r))


def _introduced(r: random.Random, name: str) -> Exchange:
    question = f"{r.choice(('Hi', 'Hello', 'Hey'))}, my name is {name}."
    return Exchange(
        question,
        f"Nice to meet you, {name}! How can I help you today?",
        f"The user is called {name}.",
    )


def _capital(r: random.Random) -> Exchange:
    country = r.choice(sorted(CAPITAL))
    question = r.choice(
        (f"What is the capital of {country}?", f"Which city is the capital of {country}?")
    )
    return Exchange(
        question,
        f"The capital of {country} is {CAPITAL[country]}.",
        f"{country}: {CAPITAL[country]}.",
    )


def _opposite(r: random.Random) -> Exchange:
    word = r.choice(sorted(OPPOSITES))
    return Exchange(
        f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."
    )


def _animals(r: random.Random) -> Exchange:
    chosen = r.sample(ANIMALS, r.randint(2, 5))
    count = ("two", "three", "four", "five")[len(chosen) - 2]
    return Exchange(f"Name {count} animals.", "Here you are: " + ", ".join(chosen) + ".")


def _count(r: random.Random) -> Exchange:
    low = r.randint(1, 60)
    high = low + r.randint(3, 12)
    return Exchange(f"Count from {low} to {high}.", ", ".join(map(str, range(low, high + 1))) + ".")


def _repeat(r: random.Random) -> Exchange:
    thing, place = with_article(r.choice(THINGS)), r.choice(PLACES)
    text = f"the {r.choice(COLORS)} {r.choice(ANIMALS)} found {thing} near the {place}"
    return Exchange(f"Repeat after me: {text}", text)


def _weekday(r: random.Random) -> Exchange:
    i, ahead = r.randrange(7), r.randint(1, 6)
    question = f"Today is {DAYS[i]}. What day is it in {ahead} day{'s' * (ahead > 1)}?"
    steps = ", ".join(DAYS[(i + j) % 7] for j in range(1, ahead + 1))
    return Exchange(question, f"It will be {DAYS[(i + ahead) % 7]}.", f"Count on: {steps}.")


def _month(r: random.Random) -> Exchange:
    i = r.randrange(12)
    return Exchange(
        f"Which month comes after {MONTHS[i]}?", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}."
    )


def _spell(r: random.Random) -> Exchange:
    word = r.choice(ANIMALS + THINGS + PLACES)
    return Exchange(f"Spell the word {word}.", "-".join(word.upper()) + ".")


def _sort(r: random.Random) -> Exchange:
    words = r.sample(ITEMS, r.randint(3, 6))
    return Exchange(
        f"Sort these words: {', '.join(words)}.",
        ", ".join(sorted(words)) + ".",
        "Order by the first letters.",
    )


def _who(r: random.Random) -> Exchange:
    return Exchange(r.choice(("Who are you?", "What are you?", "What can you do?")), WHO)


def _thanks(r: random.Random) -> Exchange:
    question = r.choice(("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot."))
    answer = r.choice(
        ("You are welcome!", "You are welcome! Is there anything else?", "Glad to help!")
    )
    return Exchange(question, answer)


def _snippet(r: random.Random) -> Exchange:
    what, code = r.choice(SNIPPETS)
    question = r.choice(
        (
            f"Write a Python function that {what}.",
            f"Write a python function that {what}.",
            f"Can you write a function that {what}?",
            f"Please give me a Python function that {what}.",
        )
    )
    return Exchange(question, f"```python\n{code}\n```")


def _letters(r: random.Random) -> Exchange:
    word = r.choice(ANIMALS + THINGS + PLACES)
    counted = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1))
    question = r.choice((f"How many letters does {word} have?", f"Count the letters of {word}."))
    return Exchange(question, f"The word {word} has {len(word)} letters.", f"{counted}.")


def _first_letter(r: random.Random) -> Exchange:
    word, (name, at) = r.choice(ANIMALS + THINGS), r.choice((("first", 0), ("last", -1)))
    return Exchange(
        f"What is the {name} letter of {word}?", f"The {name} letter of {word} is {word[at]}."
    )


def _plural(r: random.Random) -> Exchange:
    word = r.choice(ITEMS)
    question = r.choice((f"What is the plural of {word}?", f"How do I write more than one {word}?"))
    return Exchange(question, f"The plural of {word} is {plural(word)}.")


def _even(r: random.Random) -> Exchange:
    number = r.randint(1, 999)
    kind = "odd" if number % 2 else "even"
    question = r.choice((f"Is {number} even or odd?", f"Is the number {number} odd or even?"))
    return Exchange(question, f"{number} is {kind}.", f"The last digit is {number % 10}.")


def _upper(r: random.Random) -> Exchange:
    text = f"{r.choice(COLORS)} {r.choice(ANIMALS)} and {r.choice(COLORS)} {r.choice(THINGS)}"
    question = r.choice((f"Write this in capitals: {text}", f"Make this upper case: {text}"))
    return Exchange(question, text.upper())


def _reversed(r: random.Random) -> Exchange:
    items = r.sample(ITEMS, r.randint(3, 5))
    question = r.choice(
        (f"Reverse this list: {', '.join(items)}.", f"List these backwards: {', '.join(items)}.")
    )
    return Exchange(question, ", ".join(reversed(items)) + ".")


def _membership(r: random.Random) -> Exchange:
    items = r.sample(ITEMS, r.randint(3, 6))
    item = r.choice(items) if r.random() < 0.5 else r.choice(ITEMS)
    answer = f"Yes, {item} is in the list." if item in items else f"No, {item} is not in the list."
    return Exchange(f"Is {item} in this list: {', '.join(items)}?", answer)


def _farewell(r: random.Random) -> Exchange:
    question = r.choice(("Bye!", "Goodbye.", "See you later!", "Good night.", "I have to go now."))
    answer = r.choice(("Goodbye! Have a nice day.", "See you soon!"))
    return Exchange(question, answer)


POLITE_STARTS = (
    "Please answer: {}",
    "Quick question: {}",
    "Hey, {}",
    "Can you help me? {}",
    "I have a question. {}",
    "Tell me: {}",
)
POLITE_ENDS = ("{} Thanks!", "{} Thank you.", "{} Please be brief.", "{} I need it for school.")


def politely(r: random.Random, question: str, probability: float = 0.25) -> str:
    """The question, at times with a phrase before or behind it that does not change the answer."""
    if r.random() >= probability or not question.endswith((".", "?")):
        return question
    return r.choice(POLITE_STARTS + POLITE_ENDS).format(question)


EXCHANGES: tuple[Callable[[random.Random], Exchange], ...] = (
    _greeting,
    _how_are_you,
    _introduction,
    _capital,
    _opposite,
    _animals,
    _count,
    _repeat,
    _weekday,
    _month,
    _spell,
    _sort,
    _who,
    _thanks,
    _snippet,
    _letters,
    _first_letter,
    _plural,
    _even,
    _upper,
    _reversed,
    _membership,
    _farewell,
)


def small_talk(r: random.Random) -> Exchange:
    """One exchange of a random kind, in varied phrasing."""
    exchange = r.choice(EXCHANGES)(r)
    return exchange._replace(question=politely(r, exchange.question))


def definition(r: random.Random, corpus: Corpus) -> Exchange:
    """A dictionary question; four in five are about the common words."""
    gloss = r.choice(corpus.common) if r.random() < 0.8 else r.choice(corpus.rare)
    word = gloss.lemma
    if gloss.part == "n":
        question = r.choice(
            (
                f"What is {with_article(word)}?",
                f"Define {word}.",
                f"What does the noun {word} mean?",
                f"Explain the word {word}.",
            )
        )
        return Exchange(question, f"{word.capitalize()}: {gloss.meaning}.")
    kind = {"v": "verb", "a": "adjective", "r": "adverb"}[gloss.part]
    question = r.choice(
        (f"What does {word} mean as {with_article(kind)}?", f"Define the {kind} {word}.")
    )
    return Exchange(question, f"{word.capitalize()} ({kind}): {gloss.meaning}.")


def chat(r: random.Random, corpus: Corpus) -> Conversation:
    """Small talk over some turns; sometimes the user's name is asked for at the end."""
    messages = []
    name = first_name(r) if r.random() < 0.12 else None
    if name:
        exchange = _introduced(r, name)
        messages += [user(exchange.question), assistant(exchange.answer, exchange.reasoning)]
    for _ in range(turn_count(r, corpus)):
        exchange = small_talk(r)
        messages += [user(exchange.question), assistant(exchange.answer, exchange.reasoning)]
    if name:
        messages += [
            user("What is my name?"),
            assistant(f"Your name is {name}.", f"The user said: my name is {name}."),
        ]
    return Conversation(messages)


def define(r: random.Random, corpus: Corpus) -> Conversation:
    """One or more dictionary questions."""
    messages = []
    for _ in range(turn_count(r, corpus)):
        exchange = definition(r, corpus)
        messages += [user(politely(r, exchange.question)), assistant(exchange.answer)]
    return Conversation(messages)

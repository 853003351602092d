"""Key-value recall: codes in a list, or scattered through a long text."""

from __future__ import annotations

import random

from flare_ray.workload.generators.base import Conversation, Message, assistant, user
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.wordlists import COLORS, THINGS, first_name


def excerpt(r: random.Random, texts: list[str], length: int) -> str:
    """At most ``length`` characters of a random text: its beginning, or a window that starts at a
    line.
    """
    text = r.choice(texts)
    if len(text) <= length or r.random() < 0.3:
        return text[:length]
    start = text.rfind("\n", 0, r.randrange(len(text) - length // 2)) + 1
    return text[start : start + length]


def _codes(r: random.Random, count: int) -> dict[str, int]:
    keys = r.sample([f"{c}-{t}" for c in COLORS for t in THINGS], count)
    return {k: r.randint(100, 9999) for k in keys}


def _list(r: random.Random, count: int) -> tuple[list[Message], dict[str, int]]:
    codes = _codes(r, count)
    listed = "\n".join(f"{k}: {v}" for k, v in codes.items())
    return [
        user(f"Remember these codes:\n{listed}"),
        assistant(f"I will remember the {len(codes)} codes."),
    ], codes


def _scattered(r: random.Random, corpus: Corpus) -> tuple[list[Message], dict[str, int]]:
    """Codes as lines of their own inside a documentation excerpt."""
    length = r.randint(4000, 11000) if corpus.long_context else r.randint(400, 1800)
    lines = excerpt(r, corpus.docs, length).split("\n")
    codes = _codes(r, r.randint(1, 6))
    for key, value in codes.items():
        lines.insert(r.randint(0, len(lines)), f"The code of {key} is {value}.")
    text = "\n".join(lines)
    return [
        user(f"Read this text and remember the codes in it:\n{text}"),
        assistant("I have read the text."),
    ], codes


def _far_list(
    r: random.Random, corpus: Corpus, count: int, length: int | None = None
) -> tuple[list[Message], dict[str, int]]:
    """A list of codes, then a long documentation excerpt in a message of its own."""
    messages, codes = _list(r, count)
    length = r.randint(3000, 10_000) if length is None else length
    text = excerpt(r, corpus.docs, length)
    while len(text) < length:
        text += "\n" + excerpt(r, corpus.docs, length - len(text))
    messages += [
        user(f"Now read this text:\n{text}"),
        assistant("I have read the text."),
    ]
    return messages, codes


def recall(r: random.Random, corpus: Corpus) -> Conversation:
    """Codes first, then one or more questions about them."""
    if r.random() < 0.25:
        messages, codes = _scattered(r, corpus)
    else:
        messages, codes = _list(r, r.randint(4, 250 if corpus.long_context else r.choice((24, 56))))
        if corpus.long_context and r.random() < 0.4:
            messages, codes = _far_list(r, corpus, r.randint(4, 40))
    if r.random() < 0.15:
        name = first_name(r)
        messages += [user(f"My name is {name}."), assistant(f"Nice to meet you, {name}!")]
    for key in r.sample(sorted(codes), min(len(codes), r.randint(1, 4))):
        question, answer = _question(codes, key)
        messages += [question, assistant(answer)]
    return Conversation(messages)


def _question(codes: dict[str, int], key: str) -> tuple[Message, str]:
    return user(f"What is the code of {key}?"), f"The code of {key} is {codes[key]}."


def far_recall(r: random.Random, corpus: Corpus, length: int) -> tuple[list[Message], str]:
    """A few codes, a text of ``length`` characters, a question about one code, and the answer."""
    messages, codes = _far_list(r, corpus, r.randint(4, 16), length)
    question, answer = _question(codes, r.choice(list(codes)))
    return [*messages, question], answer


def long_recall(r: random.Random, count: int) -> tuple[list[Message], str]:
    """A list of ``count`` codes (at most 260), a question about one of them, and the answer."""
    messages, codes = _list(r, count)
    question, answer = _question(codes, r.choice(sorted(codes)))
    return [*messages, question], answer


def distant_recall(r: random.Random, corpus: Corpus) -> tuple[list[Message], str]:
    """A question about a code more than 2,048 tokens back, and the answer: one of the first of 250
    listed codes, or one of few codes before a long text.
    """
    if r.random() < 0.5:
        messages, codes = _list(r, 250)
        question, answer = _question(codes, r.choice(list(codes)[:30]))
    else:
        messages, codes = _far_list(r, corpus, r.randint(4, 40), 10_000)
        question, answer = _question(codes, r.choice(list(codes)))
    return [*messages, question], answer

"""Training documents and evaluation prompts of ten categories, from the shared generators.

Every generator takes a ``random.Random`` and a :class:`~benchmarks.demo_training.corpus.Corpus`;
the same seed on the same installed packages gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from flare_ray.workload.generators.base import Conversation
from flare_ray.workload.generators.chat import chat, define
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.edits import edit_code
from flare_ray.workload.generators.recall import excerpt, recall
from flare_ray.workload.generators.records import json_records
from flare_ray.workload.generators.story import story
from flare_ray.workload.generators.sums import math
from flare_ray.workload.generators.tools import tool_use, with_system_prompt

from .chat_format import LAYOUT
from .family import ChatLayout

CONVERSATIONS: dict[str, Callable[[random.Random, Corpus], Conversation]] = {
    "chat": chat,
    "define": define,
    "story": story,
    "math": math,
    "json": json_records,
    "tool": tool_use,
    "edit": edit_code,
    "recall": recall,
}
RAW = ("code", "docs")
CATEGORIES = (*CONVERSATIONS, *RAW)

TOKEN_SHARES = {
    "chat": 5,
    "define": 7,
    "story": 4,
    "math": 7,
    "json": 8,
    "tool": 11,
    "edit": 36,
    "recall": 4,
    "code": 10,
    "docs": 8,
}
"""Per cent of training tokens. Templates are learnt early; exact copying of edited functions takes
the most.
"""
LONG_SHARES = TOKEN_SHARES | {
    "recall": 12,
    "edit": 31,
    "tool": 10,
    "define": 5,
    "json": 7,
    "math": 5,
}
"""The same for rows of 4,096 tokens."""

RAW_CHARS = 3200
RAW_CHARS_LONG = 12000
DOCSTRING_SHARE, PROSE_SHARE = 0.5, 0.4


def raw_text(r: random.Random, texts: list[str], length: int, chat: ChatLayout = LAYOUT) -> str:
    """A document excerpt behind the prefix tokens; it ends with the end token where the document
    does.
    """
    text = excerpt(r, texts, length)
    return chat.raw_prefix + text + (chat.end_of_text if len(text) < length else "")


def example(category: str, r: random.Random, corpus: Corpus, chat: ChatLayout = LAYOUT) -> str:
    """One training document as text."""
    if category in RAW:
        length = RAW_CHARS_LONG if corpus.long_context else RAW_CHARS
        if category == "code":
            return raw_text(r, corpus.code, length, chat)
        if corpus.prose and r.random() < PROSE_SHARE:
            return raw_text(r, corpus.prose, length, chat)
        docstrings = corpus.docstrings and r.random() < DOCSTRING_SHARE
        return raw_text(r, corpus.docstrings if docstrings else corpus.docs, length, chat)
    conversation = with_system_prompt(r, CONVERSATIONS[category](r, corpus))
    end = r.choice(chat.conversation_ends)
    effort = r.choice(chat.efforts)
    return chat.render(conversation.messages, conversation.tools, effort=effort) + end


def prompt_case(
    category: str, r: random.Random, corpus: Corpus, chat: ChatLayout = LAYOUT
) -> dict[str, Any]:
    """An evaluation item: a conversation up to an assistant turn, and the expected assistant
    message.
    """
    messages, tools = with_system_prompt(r, CONVERSATIONS[category](r, corpus))
    at = r.choice([i for i, m in enumerate(messages) if m["role"] == "assistant"])
    return {
        "category": category,
        "messages": messages[:at],
        "tools": tools,
        "expected": messages[at],
        "prompt": chat.render(messages[:at], tools, generate=True),
    }


def mean_characters(corpus: Corpus, chat: ChatLayout, samples: int = 48) -> dict[str, float]:
    """Mean length of a document by category, from a fixed seed: turns token shares into draw
    weights.
    """
    r = random.Random("lengths")
    return {
        c: sum(len(example(c, r, corpus, chat)) for _ in range(samples)) / samples
        for c in CATEGORIES
    }


def documents(
    r: random.Random, corpus: Corpus, shares: dict[str, int], chat: ChatLayout = LAYOUT
) -> Iterator[str]:
    """Endless documents whose characters follow ``shares``."""
    lengths = mean_characters(corpus, chat)
    categories = list(shares)
    weights = [shares[c] / lengths[c] for c in categories]
    while True:
        yield example(r.choices(categories, weights)[0], r, corpus, chat)

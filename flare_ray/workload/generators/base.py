"""Building blocks shared by the conversation generators."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from flare_ray.workload.generators.corpus import Corpus

Message = dict[str, Any]


def to_json(value: object) -> str:
    """JSON as the chat template writes it: no escapes for non-ASCII letters, no sorting."""
    return json.dumps(value, ensure_ascii=False)


class Conversation(NamedTuple):
    """Messages of one conversation and the function signatures offered in it, if any."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(
    content: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None
) -> Message:
    """An assistant message; calls are ``{"name", "arguments"}``."""
    message: Message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


def turn_count(r: random.Random, corpus: Corpus) -> int:
    """User turns of one conversation: one to three, or many where the row is long."""
    return r.randint(5, 14) if corpus.long_context else r.choice((1, 1, 2, 3))


def noun(r: random.Random, corpus: Corpus) -> str:
    """A common noun of the dictionary."""
    return word_of(r, corpus, "n")


def verb(r: random.Random, corpus: Corpus) -> str:
    """A common verb of the dictionary."""
    return word_of(r, corpus, "v")


def word_of(r: random.Random, corpus: Corpus, part: str) -> str:
    """A word of the given part of speech, three to ten letters; draws until one fits."""
    while True:
        gloss = r.choice(corpus.common)
        if gloss.part == part and 3 <= len(gloss.lemma) <= 10:
            return gloss.lemma

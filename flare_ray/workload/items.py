"""Records of a workload: what is asked, where it comes from, and what a right answer is.

An item is one generation. A conversation of several generations is a *session*: its items share
`session`, follow each other in `turn`, and each holds the whole recorded conversation before it. So
every arm meets the same contexts whatever it has generated itself, and no tool is ever executed:
tool results are part of the messages (contract: B1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

CATEGORIES = (
    *("agentic", "tool_json", "edit", "reasoning", "chat", "long"),
    *("prefix_tails", "prefix_repeats"),
)
"""Of the frozen workload, in the order of reports."""
SYNTHETIC = "synthetic"
"""Category of the serving corpus, on which no claim about acceptance rests (contract: B6)."""

Check = Literal["none", "exact", "contains", "json", "calls", "code", "number"]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an item comes from.

    Attributes:
        name: generator, or the imported file's name.
        key: seed of the item, or its line.
        licence: SPDX expression, or what the importer was told.
    """

    name: str
    key: str
    licence: str


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of one item; None = the checkpoint's default (contract: B2, S3)."""

    seed: int
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a right answer is; `checks.check` decides.

    Attributes:
        check: kind of comparison; none = any answer passes and nothing is claimed.
        value: what the kind compares with.
    """

    check: Check = "none"
    value: Any = None


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation.

    Attributes:
        item_id: unique in its workload.
        session / turn: conversation it belongs to and its place there, from 0.
        messages: OpenAI chat messages up to the answer; empty where `prompt` is given.
        prompt: raw text for a completion, instead of messages.
        tools: OpenAI function declarations.
        prediction: text most of which the answer repeats, for arms that offer copies; "" = none.
    """

    item_id: str
    category: str
    session: str
    turn: int
    source: Source
    settings: Settings
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    expected: Expectation = Expectation()
    prediction: str = ""


class Call(msgspec.Struct, frozen=True):
    """A function call of an answer; arguments decoded, or the text that is no JSON object."""

    name: str
    arguments: Any


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back: visible text, reasoning, calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def openai_message(message: Mapping[str, Any], *, turn: int = 0) -> dict[str, Any]:
    """A generator's message as the API spells it; generators keep calls as name and arguments.

    Args:
        turn: distinguishes the ids of this message's calls from those of others.
    """
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return dict(message) | {
        "tool_calls": [
            {
                "id": f"call_{turn}_{place}",
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for place, call in enumerate(calls)
        ]
    }


def openai_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A generator's conversation as the API spells it: results name the call that they answer.

    Reasoning of earlier turns is left out, as clients leave it out.
    """
    out: list[dict[str, Any]] = []
    waiting: list[str] = []
    for turn, message in enumerate(messages):
        spelled = openai_message(message, turn=turn)
        spelled.pop("reasoning_content", None)
        if spelled["role"] == "tool":
            spelled["tool_call_id"] = waiting.pop(0)
        else:
            waiting = [call["id"] for call in spelled.get("tool_calls", ())]
        out.append(spelled)
    return tuple(out)


def encode_items(items: Iterable[Item]) -> bytes:
    """JSON lines, fields in the order of their declaration, nothing that depends on the host."""
    return b"".join(msgspec.json.encode(item) + b"\n" for item in items)


def decode_items(data: bytes) -> list[Item]:
    """The opposite of `encode_items`.

    Raises:
        msgspec.ValidationError: a line is no item.
    """
    decoder = msgspec.json.Decoder(Item)
    return [decoder.decode(line) for line in data.splitlines() if line.strip()]


def sessions_of(items: Iterable[Item]) -> list[tuple[Item, ...]]:
    """Items by session, sessions in order of first appearance, turns in order."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.session, []).append(item)
    return [tuple(sorted(session, key=lambda item: item.turn)) for session in found.values()]

"""The chat layout in Python: what the generators write, what the Jinja template must equal, and how
an answer is read back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, TypedDict

from flare_ray.workload.generators.base import Message, to_json

from .family import ChatLayout

TOOL_HEADER = (
    "\n# Tools\n\nYou can call these functions. Signatures, one JSON object per line:\n<tools>\n"
)
TOOL_FOOTER = (
    "</tools>\n\nWrite a call as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>"
    "</tool_call>, strings raw, other values as JSON."
)


class Answer(TypedDict):
    """One assistant turn read back from generated text."""

    reasoning: str
    content: str
    calls: list[dict[str, Any]]


def raw_value(value: object) -> str:
    """A tool argument as it stands between the tags: strings raw, anything else as JSON."""
    return value if isinstance(value, str) else to_json(value)


def render(
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    *,
    effort: str = "Max",
    generate: bool = False,
) -> str:
    """Text of a conversation; segments follow each other without newlines.

    Args:
        messages: chat messages; assistant calls may carry ``function`` or be ``{"name",
            "arguments"}`` themselves.
        tools: function signatures.
        effort: ``Low``, ``High`` or ``Max``.
        generate: end inside an open assistant turn.
    Returns:
        The text; reasoning is kept only after the last user message.
    """
    out = ["[gMASK]<sop><|system|>Reasoning Effort: " + effort]
    if tools:
        lines = "".join(to_json(t) + "\n" for t in tools)
        out.append("<|system|>" + TOOL_HEADER + lines + TOOL_FOOTER)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    previous = ""
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            head = "" if previous == "tool" else "<|observation|>"
            out.append(f"{head}<tool_response>{content}</tool_response>")
        elif role == "assistant":
            reasoning = (message.get("reasoning_content") or "") if i > last_user else ""
            out.append(f"<|assistant|><think>{reasoning}</think>{content}")
            out += [_call_text(call) for call in message.get("tool_calls") or ()]
        else:
            out.append(f"<|{role}|>{content}")
        previous = role
    if generate:
        out.append("<|assistant|><think>")
    return "".join(out)


def _call_text(call: Message) -> str:
    call = call.get("function", call)
    pairs = "".join(
        f"<arg_key>{k}</arg_key><arg_value>{raw_value(v)}</arg_value>"
        for k, v in call["arguments"].items()
    )
    return f"<tool_call>{call['name']}{pairs}</tool_call>"


def parse_answer(text: str) -> Answer:
    """Read a continuation that starts inside ``<think>``; argument values stay the raw strings
    between their tags.
    """
    reasoning, _, rest = text.partition("</think>")
    calls = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", rest, re.S):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", body, re.S)
        name = body.split("<arg_key>", 1)[0].strip()
        calls.append({"name": name, "arguments": dict(pairs)})
    return {
        "reasoning": reasoning,
        "content": rest.split("<tool_call>", 1)[0],
        "calls": calls,
    }


def expected_answer(message: Message) -> Answer:
    """An assistant message in the form of :func:`parse_answer`, for comparison."""
    calls = [
        {"name": c["name"], "arguments": {k: raw_value(v) for k, v in c["arguments"].items()}}
        for c in message.get("tool_calls") or ()
    ]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
        "calls": calls,
    }


def chat_template() -> str:
    """The Jinja template that goes into ``tokenizer_config.json``."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text("utf-8")


LAYOUT = ChatLayout(
    render=render,
    parse_answer=parse_answer,
    expected_answer=expected_answer,
    chat_template=chat_template,
    answer_text="</think>{}<|user|>".format,
    opened="<|assistant|><think>",
    raw_prefix="[gMASK]<sop>",
    end_of_text="<|endoftext|>",
    conversation_ends=("<|user|>", "<|user|>", "<|endoftext|>"),
    efforts=("Max", "Max", "High", "Low"),
)

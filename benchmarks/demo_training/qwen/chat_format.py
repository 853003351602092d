"""The chat layout in Python: what the generators write, what the Jinja template must equal, and how
an answer is read back.

Turns are ``<|im_start|>ROLE``, a line break, text, ``<|im_end|>``, a line break. Every assistant
turn keeps its reasoning, so that prompts grow at their end alone. An empty reasoning is one line
break between its tags where the prompt left them open, two where thinking is off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from flare_ray.workload.generators.base import Message, to_json

from ..chat_format import Answer, expected_answer, raw_value
from ..family import ChatLayout

TOOL_HEADER = "# Tools\n\nYou can call these functions, one JSON signature a line:\n<tools>\n"
TOOL_FOOTER = (
    "</tools>\n\nWrite a call as\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n"
    "</parameter>\n</function>\n</tool_call>\nwith strings raw and other values as JSON."
)
OPENED = "<|im_start|>assistant\n<think>\n"
NO_THINKING = "off"
"""Effort under which assistant turns have no reasoning: the template's ``enable_thinking``."""


def render(
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    *,
    effort: str = "xhigh",
    generate: bool = False,
) -> str:
    """Text of a conversation.

    Args:
        messages: chat messages, a system message first if at all; assistant calls may carry
            ``function`` or be ``{"name", "arguments"}`` themselves.
        tools: function signatures.
        effort: ``low``, ``medium``, ``xhigh`` or ``off``.
        generate: end inside an open assistant turn.
    """
    messages, parts = list(messages), []
    if effort in ("low", "xhigh"):
        parts.append(f"Reasoning effort: {effort}.")
    if tools:
        lines = "".join(to_json(t) + "\n" for t in tools)
        parts.append(TOOL_HEADER + lines + TOOL_FOOTER)
    if messages and messages[0]["role"] == "system":
        parts.append(messages.pop(0).get("content") or "")
    head = "\n\n".join(parts)
    out = [f"<|im_start|>system\n{head}<|im_end|>\n"] if parts else []
    previous = ""
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            head = "\n" if previous == "tool" else "<|im_start|>user\n"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            tail = "<|im_end|>\n" if last else ""
            out.append(f"{head}<tool_response>\n{content}\n</tool_response>{tail}")
        elif role == "assistant":
            out.append(_assistant_text(message, content, effort))
        else:
            out.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
        previous = role
    if generate:
        out.append(OPENED + ("\n</think>\n\n" if effort == NO_THINKING else ""))
    return "".join(out)


def _assistant_text(message: Message, content: str, effort: str) -> str:
    reasoning = "" if effort == NO_THINKING else message.get("reasoning_content") or ""
    closed = "\n" if reasoning or effort == NO_THINKING else ""
    calls = "\n".join(_call_text(call) for call in message.get("tool_calls") or ())
    between = "\n\n" if content and calls else ""
    return f"{OPENED}{reasoning}{closed}</think>\n\n{content}{between}{calls}<|im_end|>\n"


def _call_text(call: Message) -> str:
    call = call.get("function", call)
    pairs = "".join(
        f"<parameter={k}>\n{raw_value(v)}\n</parameter>\n" for k, v in call["arguments"].items()
    )
    return f"<tool_call>\n<function={call['name']}>\n{pairs}</function>\n</tool_call>"


def parse_answer(text: str) -> Answer:
    """Read a continuation that starts inside ``<think>``; argument values stay the raw strings
    between their tags.
    """
    reasoning, _, rest = text.partition("</think>")
    calls = []
    for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", rest, re.S):
        name = re.match(r"<function=(.*?)>\n", body)
        pairs = re.findall(r"<parameter=(.*?)>\n(.*?)\n</parameter>", body, re.S)
        calls.append({"name": name[1] if name else "", "arguments": dict(pairs)})
    content, found, _ = rest.removeprefix("\n\n").partition("<tool_call>")
    return {
        "reasoning": reasoning.removesuffix("\n"),
        "content": content.removesuffix("\n\n") if found else content,
        "calls": calls,
    }


def chat_template() -> str:
    """The Jinja template that goes into ``tokenizer_config.json``."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text("utf-8")


def answer_text(content: str) -> str:
    """An answer without reasoning, from behind the opened turn to its end marker."""
    return f"</think>\n\n{content}<|im_end|>"


LAYOUT = ChatLayout(
    render=render,
    parse_answer=parse_answer,
    expected_answer=expected_answer,
    chat_template=chat_template,
    answer_text=answer_text,
    opened=OPENED,
    raw_prefix="",
    end_of_text="<|endoftext|>",
    conversation_ends=("<|endoftext|>",),
    efforts=("xhigh", "xhigh", "xhigh", "medium", "low", NO_THINKING),
)

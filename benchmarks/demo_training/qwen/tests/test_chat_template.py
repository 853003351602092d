"""The Jinja template against the Python renderer, and answers read back."""

import functools
import json

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from benchmarks.demo_training.heldout import FROZEN_PROMPTS, selected
from benchmarks.demo_training.qwen.chat_format import (
    LAYOUT,
    NO_THINKING,
    OPENED,
    answer_text,
    chat_template,
    parse_answer,
    render,
)

ANSWER = {
    "role": "assistant",
    "content": "text",
    "reasoning_content": "why",
    "tool_calls": [
        {"name": "f", "arguments": {"a": "two\nlines", "b": [3, "x"]}},
        {"name": "g", "arguments": {}},
    ],
}
RESULTS = [{"role": "tool", "content": c} for c in ("1", "2")]


@functools.cache
def compiled():
    """The template in an environment set up as transformers does."""

    def fail(message):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    return environment.from_string(chat_template())


def rendered(messages, **variables):
    return compiled().render(messages=messages, **variables)


@pytest.mark.parametrize("effort", ["low", "medium", "xhigh", NO_THINKING])
def test_template_equals_renderer_on_every_held_out_conversation(effort):
    off = effort == NO_THINKING
    chosen = {"enable_thinking": False} if off else {"reasoning_effort": effort}
    for item in (i for i in selected(FROZEN_PROMPTS) if i["messages"]):
        messages = [*item["messages"], item["expected"]]
        for generate in (True, False):
            text = rendered(messages, tools=item["tools"], add_generation_prompt=generate, **chosen)
            assert text == render(messages, item["tools"], effort=effort, generate=generate)


def test_results_of_tools_share_a_turn():
    user = {"role": "user", "content": "q"}
    text = render([user, ANSWER, *RESULTS, user])
    assert text == rendered([user, ANSWER, *RESULTS, user])
    shown = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert f"<|im_end|>\n<|im_start|>user\n{shown}<|im_start|>user\nq" in text


@pytest.mark.parametrize("without", [(), ("content",), ("tool_calls",), ("reasoning_content",)])
def test_answer_is_read_back_as_rendered(without):
    message = {k: v for k, v in ANSWER.items() if k not in without}
    text = render([message]).split(OPENED)[1].removesuffix("<|im_end|>\n")
    assert parse_answer(text) == LAYOUT.expected_answer(message)
    assert ("<function=f>\n<parameter=a>\ntwo\nlines\n</parameter>" in text) == (
        "tool_calls" not in without
    )


def test_answer_without_reasoning_continues_an_opened_turn():
    question = [{"role": "user", "content": "q"}]
    whole = render([*question, {"role": "assistant", "content": "a"}])
    assert whole == render(question, generate=True) + answer_text("a") + "\n"


def test_reasoning_is_kept_unless_asked_otherwise():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
    ]
    assert "old\n</think>" in rendered(messages)
    assert "old" not in rendered(messages, preserve_thinking=False)
    assert "old" not in rendered(messages, enable_thinking=False)


@pytest.mark.parametrize(
    ("messages", "variables", "told"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}, "first"),
        ([{"role": "developer", "content": "x"}], {}, "developer"),
        ([{"role": "user", "content": "x"}], {"reasoning_effort": "huge"}, "huge"),
    ],
)
def test_refusals_name_their_cause(messages, variables, told):
    with pytest.raises(jinja2.TemplateError, match=told):
        rendered(messages, **variables)

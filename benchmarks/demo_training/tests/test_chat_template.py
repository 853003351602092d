"""The Jinja template against the Python renderer, and its own rules."""

import functools
import json

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from benchmarks.demo_training.chat_format import chat_template, parse_answer, render
from benchmarks.demo_training.heldout import FROZEN_PROMPTS, selected

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "one", "arguments": {"x": 1, "y": "z"}}},
    {"id": "b", "type": "function", "function": {"name": "two", "arguments": {}}},
]
TRIMS = [True, False]


@functools.cache
def compiled(trim):
    """The template in an environment set up as transformers does."""

    def fail(message):
        raise jinja2.TemplateError(message)

    def tojson(value):
        return json.dumps(value, ensure_ascii=False)

    environment = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    return environment.from_string(chat_template())


def rendered(messages, *, trim=True, **variables):
    return compiled(trim).render(messages=messages, **variables)


@pytest.mark.parametrize("trim", TRIMS)
def test_template_equals_renderer_on_every_held_out_conversation(trim):
    items = [i for i in selected(FROZEN_PROMPTS) if i["messages"]]
    assert len(items) == 8 * 24
    for item in items:
        text = rendered(
            item["messages"], trim=trim, tools=item["tools"], add_generation_prompt=True
        )
        assert text == item["prompt"]


@pytest.mark.parametrize("content", [None, "", [], "missing"])
def test_empty_content_renders_as_nothing(content):
    message = {"role": "assistant", "content": content, "tool_calls": CALLS[:1]}
    if content == "missing":
        del message["content"]
    text = rendered([{"role": "user", "content": "hi"}, message])
    assert text.endswith(
        "<|user|>hi<|assistant|><think></think><tool_call>one<arg_key>x</arg_key>"
        "<arg_value>1</arg_value><arg_key>y</arg_key><arg_value>z</arg_value></tool_call>"
    )


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a  b\n"}, {"type": "text", "text": "c"}]
    assert rendered([{"role": "user", "content": parts}]).endswith("<|user|>a  b\nc")


def test_image_part_is_refused_by_its_type():
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(jinja2.TemplateError, match="image_url"):
        rendered([{"role": "user", "content": parts}])


def test_arguments_as_text_are_refused_by_the_name_of_the_call():
    call = {"function": {"name": "one", "arguments": "{}"}}
    with pytest.raises(jinja2.TemplateError, match="one"):
        rendered([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_unknown_role_is_refused_by_its_name():
    with pytest.raises(jinja2.TemplateError, match="developer"):
        rendered([{"role": "developer", "content": "x"}])


def _tool_turn(results):
    asked = {"role": "assistant", "content": None, "tool_calls": CALLS}
    answers = [{"role": "tool", "tool_call_id": i, "content": c} for i, c in results]
    text = rendered([{"role": "user", "content": "q"}, asked, *answers])
    return text.split("<|observation|>")[1]


def test_results_follow_the_calls_when_ids_are_unique_and_complete():
    expected = "<tool_response>1</tool_response><tool_response>2</tool_response>"
    assert _tool_turn([("b", "2"), ("a", "1")]) == expected
    assert _tool_turn([("a", "1"), ("b", "2")]) == expected


@pytest.mark.parametrize("ids", [("b", "b"), ("b", "c"), ("b", None)])
def test_results_keep_their_order_when_ids_do_not_match_the_calls(ids):
    text = _tool_turn([(ids[0], "2"), (ids[1], "1")])
    assert text == "<tool_response>2</tool_response><tool_response>1</tool_response>"


def test_results_of_two_rounds_stay_in_their_rounds():
    first = {"role": "assistant", "tool_calls": CALLS[:1]}
    second = {"role": "assistant", "tool_calls": CALLS[1:]}
    text = rendered(
        [
            {"role": "user", "content": "q"},
            first,
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            second,
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ]
    )
    assert text.count("<|observation|>") == 2
    assert text.index("<tool_response>1") < text.index("two") < text.index("<tool_response>2")


def test_reasoning_before_the_last_user_turn_is_dropped_unless_kept():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "new"},
    ]
    assert "old" not in rendered(messages) and "new" in rendered(messages)
    assert "old" in rendered(messages, clear_thinking=False)


@pytest.mark.parametrize(
    ("effort", "shown"), [(None, "Max"), ("low", "Low"), ("High", "High"), ("minimal", "Max")]
)
def test_effort_is_low_high_or_max(effort, shown):
    text = rendered([{"role": "user", "content": "x"}], reasoning_effort=effort)
    assert text.startswith(f"[gMASK]<sop><|system|>Reasoning Effort: {shown}<|user|>")


def test_answer_is_read_back_as_rendered():
    message = {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "why",
        "tool_calls": [{"name": "f", "arguments": {"a": "raw", "b": 3}}],
    }
    text = render([message]).split("<|assistant|><think>")[1]
    assert parse_answer(text) == {
        "reasoning": "why",
        "content": "text",
        "calls": [{"name": "f", "arguments": {"a": "raw", "b": "3"}}],
    }

"""What is wrong with a request is said before an engine hears of it, in OpenAI's shape."""

import json

import pytest

from flare_ray.frontend.openai.parameters import NEUTRAL
from tests.unit.frontend.conftest import MAX_BODY_BYTES, chat_body, error_of

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00x"}',
        b"[" * 5000,
        b'{"temperature": 1e999}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_malformed_json_is_400(api, path, data):
    response = api.request("POST", path, content=data)
    assert error_of(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("declared", [True, False])
def test_body_above_the_limit_is_413(api, declared):
    data = json.dumps(chat_body(user="x" * MAX_BODY_BYTES)).encode()

    async def pieces():
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    response = api.request("POST", "/v1/chat/completions", content=data if declared else pieces())
    assert error_of(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", ["chat", "complete"])
def test_unknown_model_is_404(api, call, stream):
    error = error_of(getattr(api, call)(model="other", stream=stream), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ...}, "model"),
        ({"model": 3}, "model"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": [5]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None),
        ({"messages": [{**USER, "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"max_completion_tokens": 100000}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"reproducible": 1}, "reproducible"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 65}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
        ({"logit_bias": {"7": "1"}}, "logit_bias.7"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a long word of many bytes"]}, "bad_words"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs.nonsense"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "x"}},
            "chat_template_kwargs.reasoning_effort",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}},
            "reasoning_effort",
        ),
        ({"user": 5}, "user"),
        ({"nonsense": 5}, "nonsense"),
    ],
)
def test_probe_2_wrong_or_empty_chat_field_is_400_and_named(api, fields, param):
    error = error_of(api.chat(**fields), 400)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert not api.client.requests


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_parameter_that_is_not_built_is_refused_by_name_and_its_neutral_values_are_taken(
    make_api, name
):
    api = make_api()
    error = error_of(api.chat(**{name: {"something": "else"}}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not api.client.requests
    for value in (None, *NEUTRAL[name]):
        assert api.chat(**{name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verbosity", "low"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_value_that_asks_for_something_is_refused(api, name, value):
    assert error_of(api.chat(**{name: value}), 400)["param"] == name


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "input_image"])
def test_other_than_text_parts_are_refused_by_name(api, kind):
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:"}}]
    error = error_of(api.chat(messages=[{"role": "user", "content": parts}]), 400)
    assert error["param"] == "messages[0].content[1].type"
    assert kind in error["message"]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_probe_3_prompt_beyond_the_context_is_400_with_both_numbers(api, path):
    long = "x" * 450
    fields = (
        {"messages": [{"role": "user", "content": long}]} if path == "chat" else {"prompt": long}
    )
    error = error_of(getattr(api, path)(**fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(api.client.engine_info.max_prompt_tokens) in error["message"]
    assert "450" in error["message"] or path == "chat"
    assert not api.client.requests


def test_budget_beyond_the_context_is_400_with_both_numbers(api):
    error = error_of(api.complete(max_tokens=600), 400)
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert "512" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], ["a", ""], [[]], [[1], []], 5, {}, None, [1, "a"], [1.5], [[1], [True]]],
)
def test_probe_2_wrong_or_empty_prompt_is_400(api, prompt):
    assert error_of(api.complete(prompt=prompt), 400)["param"].startswith("prompt")


@pytest.mark.parametrize("prompt", [[300], [-1], [[1], [2, 300]]])
def test_token_id_outside_the_vocabulary_is_400(api, prompt):
    assert error_of(api.complete(prompt=prompt), 400)["param"].startswith("prompt")


def test_missing_prompt_is_400(api):
    assert error_of(api.post("/v1/completions", {"model": "tiny"}), 400)["param"] == "prompt"


def test_template_that_refuses_says_why(api):
    error = error_of(api.chat(messages=[{"role": "user", "content": "refuse me"}]), 400)
    assert "no such words" in error["message"]


def test_unknown_path_is_404_and_wrong_method_405_in_shape(api):
    assert error_of(api.get("/v1/nonsense"), 404)["code"] == "not_found"
    assert error_of(api.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"


def test_several_problems_are_listed_together(api):
    error = error_of(api.chat(temperature="hot", top_k="many"), 400)
    assert "temperature" in error["message"]
    assert "top_k" in error["message"]


def test_schema_that_cannot_be_enforced_is_named_by_its_place_among_all_tools(api):
    function = {"name": "g", "strict": True, "parameters": {"type": "object", "not": {}}}
    choice = {"type": "function", "function": {"name": "g"}}
    tools = [TOOL, {"type": "function", "function": function}]
    response = api.post("/v1/chat/completions", chat_body(tools=tools, tool_choice=choice))
    assert error_of(response, 400)["param"] == "tools[1].function.parameters"

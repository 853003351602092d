"""The OpenAI Responses API over a scripted engine."""

import json

import msgspec
import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.errors import Overloaded
from flare_ray.frontend.responses.requests import REFUSED
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import error_of, named_events

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"


def respond(api, headers=None, **fields):
    body = {"model": "tiny", "input": "hi", **fields}
    body = {key: value for key, value in body.items() if value is not ...}
    return api.request("POST", "/v1/responses", json=body, headers=headers)


def events(response):
    """Events of a stream, numbered from 0."""
    found = named_events(response)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def test_whole_answer(make_api):
    api = make_api(answer("why</think>\nbecause €"))
    body = respond(
        api,
        headers={"x-request-id": "r1"},
        instructions="be brief",
        metadata={"a": "b"},
        temperature=0.5,
    ).json()
    assert (body["id"], body["object"], body["status"]) == ("resp_r1", "response", "completed")
    reasoning, message = body["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    text = {"type": "output_text", "text": "\nbecause €", "annotations": [], "logprobs": []}
    assert message["content"] == [text]
    output = len(byte_tokens("why</think>\nbecause €")) + 1
    prompt = len(api.client.requests[0].prompt_tokens)
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": len("why</think>")},
        "total_tokens": prompt + output,
    }
    assert (body["store"], body["background"], body["previous_response_id"]) == (False, False, None)
    assert body["metadata"] == {"a": "b"}
    assert (body["temperature"], body["top_p"]) == (0.5, 0.95)
    assert body["instructions"] == "be brief"
    assert "be brief" in api.prompt


@pytest.mark.parametrize("step", [1, 7, 500])
@pytest.mark.parametrize(
    "text",
    ["why</think>so", f"a</think>\n{CALL}\n{CALL}", "", "only thought", f"x</think>b{CALL}c"],
)
def test_stream_is_ordered_and_ends_with_the_whole_answer(make_api, text, step):
    fields = {"tools": [TOOL], "headers": {"x-request-id": "same"}}
    whole = respond(make_api(answer(text, step=step)), **fields).json()
    found = events(respond(make_api(answer(text, step=step)), stream=True, **fields))
    assert [e["type"] for e in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["output"] == []
    assert found[-1]["type"] == "response.completed"
    last = found[-1]["response"]
    times = {"created_at": 0, "completed_at": 0}
    assert {**last, **times} == {**whole, **times}
    items, grown = [], {}
    for e in found[2:-1]:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert e["output_index"] == len(items)
            assert e["item"]["status"] == "in_progress"
            grown[e["item"]["id"]] = ""
        elif kind == "output_item.done":
            items.append(e["item"])
        elif kind.endswith(".delta"):
            assert e["output_index"] == len(items)
            grown[e["item_id"]] += e["delta"]
        elif kind.endswith("text.done"):
            assert e["text"] == grown[e["item_id"]]
        elif kind == "function_call_arguments.done":
            assert e["arguments"] == grown[e["item_id"]]
    assert items == whole["output"]


def test_streamed_call_that_breaks_off_is_incomplete(make_api):
    api = make_api(answer("x</think>" + CALL.replace("</tool_call>", "no more"), step=5))
    last = events(respond(api, stream=True, tools=[TOOL]))[-1]["response"]
    call, message = last["output"][-2:]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert call["arguments"] == '{"city": "Rome"'
    assert message["content"][0]["text"] == "no more"


def test_calls_have_ids_of_their_own(make_api):
    body = respond(make_api(answer(f"a</think>\n{CALL}\n{CALL}")), tools=[TOOL]).json()
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Rome"}] * 2
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert body["tools"] == [TOOL]
    assert body["output"][0]["type"] == "reasoning"
    assert len(body["output"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_answer_cut_at_its_limit_is_incomplete(make_api, stream):
    response = respond(make_api(answer("x</think>ab", reason="length")), stream=stream)
    body = response.json() if not stream else events(response)[-1]["response"]
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"


def test_tokens_read_from_the_cache_are_told(make_api):
    def script(request):
        *deltas, ended = answer("x")(request)
        return [*deltas, msgspec.structs.replace(ended, cached_tokens=9)]

    usage = respond(make_api(script)).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 9


def test_tool_loop_is_rendered_like_the_chat_request_that_says_the_same(api):
    part = {"type": "output_text", "text": "look", "annotations": [], "logprobs": []}
    first = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
        | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "weather"}
        | {"arguments": '{"city": "Rome"}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
    ]
    response = respond(api, tools=[TOOL], input=[{"role": "user", "content": "q"}, *first])
    assert response.status_code == 200, response.text
    ours = api.prompt
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    call = {"id": "c1", "type": "function", "function": function}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "user", "content": "and?"},
    ]
    declared = {key: TOOL[key] for key in ("name", "description", "parameters")}
    api.chat(tools=[{"type": "function", "function": declared}], messages=history)
    assert ours.split("<|user|>")[1:] == api.prompt.split("<|user|>")[1:]
    assert "sun" in ours


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ...}, "model"),
        ({"input": ...}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[1].call_id",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**70}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"reasoning": {"effort": "medium"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_field_is_400_and_named(api, fields, param, stream):
    error = error_of(respond(api, stream=stream, **fields), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert not api.client.requests


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_field_that_is_not_built_is_refused_and_its_neutral_values_are_taken(api, name):
    assert error_of(respond(api, **{name: {"x": 1}}), 400)["param"] == name
    for value in (None, *REFUSED[name]):
        assert respond(api, **{name: value}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_has_a_status(api, stream):
    api.client.refusal = Overloaded("full", retry_after_s=3.0)
    response = respond(api, stream=stream)
    assert error_of(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"


def test_failure_inside_a_stream_ends_with_a_failed_response(make_api):
    def script(request):
        delta = Delta(request.request_id, byte_tokens("x</think>ab"))
        return [delta, Failed(request.request_id, "rank_failure", "rank 1 died", status=503)]

    last = events(respond(make_api(script), stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "rank 1 died"}
    assert last["response"]["output"][-1]["content"][0]["text"] == "ab"
    assert "rank 1 died" in error_of(respond(make_api(script)), 503)["message"]


def test_stop_token_ends_well(make_api):
    def script(request):
        return [Finished(request.request_id, "stop", 5, 2, 7)]

    assert respond(make_api(script)).json()["status"] == "completed"


def test_stored_responses_are_refused_by_name(api):
    assert error_of(api.get("/v1/responses/resp_1"), 404)["code"] == "unsupported_endpoint"

"""The Anthropic Messages API over a scripted engine."""

import json

import msgspec
import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.errors import InvalidRequest, Overloaded, RankFailure
from flare_ray.frontend.anthropic import answer as answers
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import named_events

USER = {"role": "user", "content": "hi"}
TOOL = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
ADAPTIVE = {"type": "adaptive"}


def message(api, headers=None, **fields):
    body = {"model": "tiny", "max_tokens": 50, "messages": [USER], **fields}
    body = {key: value for key, value in body.items() if value is not ...}
    return api.request("POST", "/v1/messages", json=body, headers=headers)


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def test_whole_answer(make_api):
    api = make_api(answer("why</think>\nbecause €"))
    body = message(api, thinking=ADAPTIVE, headers={"x-request-id": "r1"}).json()
    thinking, text = body["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] == "why"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "\nbecause €", "citations": None}
    assert (body["id"], body["type"], body["role"]) == ("msg_r1", "message", "assistant")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"] == {
        "input_tokens": len(api.client.requests[0].prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(byte_tokens("why</think>\nbecause €")) + 1,
        "output_tokens_details": {"thinking_tokens": len("why</think>")},
    }


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive", "display": "omitted"}])
def test_reasoning_is_shown_only_where_it_was_asked_for(make_api, thinking):
    body = message(make_api(answer("why</think>so")), thinking=thinking).json()
    assert [block["type"] for block in body["content"]] == ["text"]
    assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_stream_has_the_events_of_the_api_in_order(make_api):
    found = named_events(
        message(
            make_api(answer(f"why</think>so{CALL}", step=4)),
            thinking=ADAPTIVE,
            tools=[TOOL],
            stream=True,
        )
    )
    kinds = [e["type"] for e in found]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("ping") == kinds.count("message_delta") == 1
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["output_tokens"] == 0
    index, kind = -1, None
    for e in found[1:-2]:
        if e["type"] == "ping":
            continue
        if e["type"] == "content_block_start":
            assert kind is None
            index, kind = index + 1, e["content_block"]["type"]
        elif e["type"] == "content_block_stop":
            kind = None
        else:
            allowed = {
                "thinking": {"thinking_delta", "signature_delta"},
                "text": {"text_delta"},
                "tool_use": {"input_json_delta"},
            }
            assert e["delta"]["type"] in allowed[kind]
        assert e["index"] == index
    assert index == 2
    last = found[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("step", [1, 7, 500])
@pytest.mark.parametrize(
    "text",
    ["why</think>so", f"a</think>\n{CALL}\n{CALL}", "", "only thought", f"x</think>b{CALL}c"],
)
def test_stream_adds_up_to_the_whole_answer(make_api, text, step):
    fields = {"thinking": ADAPTIVE, "tools": [TOOL], "headers": {"x-request-id": "same"}}
    whole = message(make_api(answer(text, step=step)), **fields).json()
    blocks = []
    for e in named_events(message(make_api(answer(text, step=step)), stream=True, **fields)):
        if e["type"] == "content_block_start":
            blocks.append(e["content_block"])
            arguments = ""
        elif e["type"] == "content_block_delta":
            delta, block = e["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif e["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
        elif e["type"] == "message_delta":
            assert e["usage"] == whole["usage"]
            assert e["delta"]["stop_reason"] == whole["stop_reason"]
    assert blocks == whole["content"]


def test_streamed_call_that_breaks_off_is_no_use_of_a_tool(make_api):
    text = "x</think>" + CALL.replace("</tool_call>", "no more")
    found = named_events(message(make_api(answer(text, step=5)), stream=True, tools=[TOOL]))
    starts = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert starts == ["tool_use", "text"]
    assert found[-2]["delta"]["stop_reason"] == "end_turn"


def test_layout_between_blocks_is_no_text_block(make_api):
    body = message(make_api(answer(f"a</think>\n\n{CALL}\n{CALL}\n")), tools=[TOOL]).json()
    assert [block["type"] for block in body["content"]] == ["tool_use", "tool_use"]
    assert [block["input"] for block in body["content"]] == [{"city": "Rome"}] * 2
    assert len({block["id"] for block in body["content"]}) == 2


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        ({"reason": "length"}, "max_tokens", None),
        ({"reason": "stop"}, "end_turn", None),
        ({"reason": "stop", "stop_reason": "XY"}, "stop_sequence", "XY"),
        ({"reason": "stop", "stop_reason": 7}, "end_turn", None),
    ],
)
def test_stop_reason(make_api, ended, reason, sequence):
    def script(request):
        return [Finished(request.request_id, ended["reason"], 5, 2, ended.get("stop_reason"))]

    body = message(make_api(script), stop_sequences=["XY"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_tokens_read_from_the_cache_are_told_apart(make_api):
    def script(request):
        *deltas, ended = answer("x")(request)
        return [*deltas, msgspec.structs.replace(ended, cached_tokens=9)]

    api = make_api(script)
    usage = message(api).json()["usage"]
    assert usage["cache_read_input_tokens"] == 9
    assert usage["input_tokens"] == len(api.client.requests[0].prompt_tokens) - 9


def test_parameters_reach_the_engine(api):
    message(
        api,
        max_tokens=33,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["a", "b"],
        service_tier="auto",
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral"},
        output_config={"effort": "low"},
    )
    (request,) = api.client.requests
    assert request.max_tokens == 33
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert request.sampling.top_k == 7
    assert request.stop == (b"a", b"b")
    assert "effort low" in api.prompt


def test_tool_loop_is_rendered_like_the_chat_request_that_says_the_same(api):
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    mark = {"type": "ephemeral", "ttl": "1h"}
    response = message(
        api,
        system=[
            {"type": "text", "text": "A", "cache_control": mark},
            {"type": "text", "text": "B"},
        ],
        tools=[TOOL],
        tool_choice={"type": "auto"},
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": mark}]},
            {"role": "system", "content": "C"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "look"},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "none"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    assert response.status_code == 200, response.text
    ours = api.prompt
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    declared = {"name": "weather", "parameters": TOOL["input_schema"], "description": "d"}
    api.chat(
        tools=[{"type": "function", "function": declared}],
        messages=[
            {"role": "system", "content": "A\n\nB"},
            {"role": "user", "content": "q"},
            {"role": "system", "content": "C"},
            {
                "role": "assistant",
                "content": "look",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "sun"},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: none"},
            {"role": "user", "content": "and?"},
        ],
    )
    assert ours.split("<|user|>")[1:] == api.prompt.split("<|user|>")[1:]
    assert "sun" in ours


def test_count_is_the_length_of_the_prompt(api):
    body = {"model": "tiny", "messages": [USER], "system": "s", "tools": [TOOL]}
    count = api.post("/v1/messages/count_tokens", body).json()
    assert message(api, system="s", tools=[TOOL]).status_code == 200
    assert count == {"input_tokens": len(api.client.requests[-1].prompt_tokens)}
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
    assert api.post("/v1/messages/count_tokens", long).json()["input_tokens"] > 5000


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": ...}, "model"),
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "txt": "x"}]}, USER]},
            "messages[0].content[0].text",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "medium"}}, "output_config.effort"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_field_is_400_and_named(api, fields, named, stream):
    error = error_of(message(api, stream=stream, **fields), 400)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert not api.client.requests


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (InvalidRequest("m"), 400, "invalid_request_error"),
        (Overloaded("m", retry_after_s=3.0), 529, "overloaded_error"),
        (Overloaded("m", retry_after_s=3.0, status=503), 503, "api_error"),
        (RankFailure("m", rank=0, round_id=1), 503, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_has_a_status(api, refusal, status, kind, stream):
    api.client.refusal = refusal
    response = message(api, stream=stream)
    assert error_of(response, status)["type"] == kind
    assert ("retry-after" in response.headers) == (status > 500)


def test_failure_inside_a_stream_is_its_last_event(make_api):
    def script(request):
        return [Delta(request.request_id, byte_tokens("x</think>ab")), failed(request)]

    def failed(request):
        return Failed(request.request_id, "rank_failure", "rank 1 died", status=503)

    found = named_events(message(make_api(script), stream=True))
    assert found[-1]["error"] == {"type": "api_error", "message": "rank 1 died"}
    assert found[-1]["type"] == "error"
    error = error_of(message(make_api(script)), 503)
    assert "rank 1 died" in error["message"]


def test_silence_is_filled_with_pings(make_api, monkeypatch):
    monkeypatch.setattr(answers, "PING_S", 0.02)
    found = named_events(message(make_api(answer("x</think>ab", step=50, pause=0.2)), stream=True))
    assert [e["type"] for e in found[:3]] == ["message_start", "ping", "ping"]
    assert found[-1]["type"] == "message_stop"


def test_other_errors_have_the_shape_of_the_api(api):
    assert error_of(message(api, model="other"), 404)["type"] == "not_found_error"
    assert error_of(api.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(api.post("/v1/messages/batches", {}), 404)["type"] == "not_found_error"
    wrong = message(api, headers={"anthropic-version": "2019-01-01"})
    assert "anthropic-version" in error_of(wrong, 400)["message"]
    for version in ("2023-06-01", "2026-10-21"):
        assert message(api, headers={"anthropic-version": version}).status_code == 200
    bad = api.request("POST", "/v1/messages", content=b'{"model": "\\ud800"}')
    assert error_of(bad, 400)["type"] == "invalid_request_error"

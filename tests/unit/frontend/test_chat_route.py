"""Chat completions over a scripted engine: whole answers and streams."""

import json

import msgspec
import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.errors import InvalidRequest, Overloaded, RankFailure
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import error_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)


def test_whole_answer_has_reasoning_content_usage_and_finish(make_api):
    api = make_api(answer("because</think>yes €"))
    response = api.chat()
    body = response.json()
    assert response.status_code == 200
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "yes €"
    assert choice["message"]["reasoning_content"] == "because"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    prompt = len(api.client.requests[0].prompt_tokens)
    completion = len(byte_tokens("because</think>yes €")) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": len("because</think>"),
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.parametrize("step", [1, 3, 50])
def test_usage_tells_reasoning_and_drafts_apart(make_api, step):
    def script(request):
        *deltas, ended = answer("why</think>because", step=step)(request)
        return [*deltas, msgspec.structs.replace(ended, drafts_offered=9, drafts_accepted=5)]

    details = make_api(script).chat().json()["usage"]["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": len("why</think>"),
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 4,
    }


def test_stream_adds_up_to_the_whole_answer(make_api):
    api = make_api(answer("because</think>yes € 🙂", step=1))
    chunks = api.chunks()
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "because"
    assert "".join(d.get("content", "") for d in deltas) == "yes € 🙂"


def test_stream_has_one_role_one_finish_and_one_id(make_api):
    chunks = make_api(answer("because</think>yes", step=1)).chunks()
    roles = [c["choices"][0]["delta"].get("role") for c in chunks]
    assert roles == ["assistant", *[None] * (len(chunks) - 1)]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "stop"]
    assert len({c["id"] for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_stream_of_an_empty_answer_still_opens_and_finishes(make_api):
    (chunk,) = make_api(answer("")).chunks()
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_stream_headers_forbid_collecting(api):
    response = api.chat(stream=True)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


@pytest.mark.parametrize("options", [..., None, {}, {"include_usage": False}])
def test_stream_has_no_usage_unless_asked(api, options):
    chunks = api.chunks(stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_with_usage_ends_with_one_usage_chunk_and_null_before(api):
    chunks = api.chunks(stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len("hello") + 1
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_stream_options_without_stream_are_refused(api):
    error = error_of(api.chat(stream_options={"include_usage": True}), 400)
    assert error["param"] == "stream_options"


def test_tool_call_is_delivered_with_decoded_arguments(make_api):
    api = make_api(answer(f"hm</think>{CALL}"))
    (choice,) = api.chat(tools=[WEATHER]).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 3}
    assert "index" not in call


def test_parallel_calls_have_their_own_index_and_stable_ids_in_streams(make_api):
    chunks = make_api(answer(f"</think>{CALL}{CALL}", step=4)).chunks(tools=[WEATHER])
    parts = [c for k in chunks for c in k["choices"][0]["delta"].get("tool_calls", [])]
    opened = [part for part in parts if "id" in part]
    assert [call["index"] for call in opened] == [0, 1]
    assert len({call["id"] for call in opened}) == 2
    assert all(call["function"]["name"] == "weather" for call in opened)
    for index in range(2):
        texts = [p["function"]["arguments"] for p in parts if p["index"] == index]
        assert len(texts) > 2
        assert json.loads("".join(texts)) == {"city": "Rome", "days": 3}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_streamed_call_that_breaks_off_is_no_call_to_be_made(make_api):
    """Contract A3: its arguments end where they are, and what follows is content."""
    broken = CALL.replace("</tool_call>", "no more") + " then"
    chunks = make_api(answer(f"</think>{broken}", step=4)).chunks(tools=[WEATHER])
    deltas = [k["choices"][0]["delta"] for k in chunks]
    parts = [c for delta in deltas for c in delta.get("tool_calls", [])]
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert arguments == '{"city": "Rome", "days": 3'
    assert "".join(delta.get("content", "") for delta in deltas) == "no more then"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_call_cut_off_by_the_budget_is_content_with_reason_length(make_api):
    api = make_api(answer(f"</think>{CALL[:-12]}", reason="length"))
    (choice,) = api.chat(tools=[WEATHER]).json()["choices"]
    assert choice["message"]["content"] == CALL[:-12]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_call_text_is_content_when_no_tools_are_offered(make_api, fields):
    api = make_api(answer(f"</think>{CALL}"))
    (choice,) = api.chat(**fields).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert "weather" not in api.prompt


def test_tools_reach_the_template(api):
    api.chat(tools=[WEATHER])
    assert '"name": "weather"' in api.prompt


def test_stop_that_matched_is_reported(make_api):
    def script(request):
        return [
            Delta(request.request_id, byte_tokens("</think>ab;"), 1),
            Finished(request.request_id, "stop", 5, 11, stop_reason=";"),
        ]

    api = make_api(script)
    (choice,) = api.chat(stop=";").json()["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("ab", ";")
    assert api.client.requests[0].stop == (b";",)
    assert api.chunks(stop=[";", "x"])[-1]["choices"][0]["stop_reason"] == ";"


def test_parameters_reach_the_engine(api):
    api.chat(
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=11,
        max_tokens=9,
        stop=["a", "€"],
        stop_token_ids=[5],
        ignore_eos=True,
        include_stop_str_in_output=True,
    )
    (request,) = api.client.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.5, 7)
    assert (sampling.min_p, sampling.seed) == (0.1, 11)
    assert (request.max_tokens, request.stop) == (9, (b"a", "€".encode()))
    assert (request.stop_token_ids, request.ignore_eos) == ((5,), True)
    assert request.include_stop


def test_defaults_are_the_checkpoints_and_the_budget_is_the_rest_of_the_context(api):
    api.chat()
    (request,) = api.client.requests
    info = api.client.engine_info
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 0.95)
    assert request.max_tokens == info.context_tokens - len(request.prompt_tokens)


def test_temperature_zero_is_greedy(api):
    api.chat(temperature=0)
    assert api.client.requests[0].sampling.top_k == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_spellings_of_the_budget_are_taken(api, name):
    api.chat(**{name: 3})
    assert api.client.requests[0].max_tokens == 3


def test_request_id_header_names_the_response(api):
    response = api.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
        headers={"X-Request-ID": "abc-1"},
    )
    assert response.json()["id"] == "chatcmpl-abc-1"
    assert api.client.requests[0].request_id == "chatcmpl-abc-1"


def test_session_header_reaches_the_router(api):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    api.post("/v1/chat/completions", body, headers={"X-Session-ID": "talk 7"})
    api.post("/v1/chat/completions", body)
    assert [request.session for request in api.client.requests] == ["talk 7", ""]


def test_session_that_is_too_long_is_refused(api):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    response = api.post("/v1/chat/completions", body, headers={"X-Session-ID": "x" * 257})
    assert error_of(response, 400)["param"] == "x-session-id"


def test_request_id_that_is_no_identifier_is_refused(api):
    response = api.request(
        "POST", "/v1/chat/completions", content=b"{}", headers={"X-Request-ID": "a b"}
    )
    assert error_of(response, 400)["param"] == "X-Request-ID"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (InvalidRequest("no", param="top_p", code="bad"), 400, "bad"),
        (Overloaded("full", retry_after_s=1.5), 429, "overloaded"),
        (Overloaded("starting", retry_after_s=2.0, status=503), 503, "service_unavailable"),
        (RankFailure("rank 1 died", rank=1, round_id=4), 503, "rank_failure"),
    ],
)
def test_refusal_comes_before_a_stream_begins(api, stream, refusal, status, code):
    api.client.refusal = refusal
    response = api.chat(stream=stream)
    assert error_of(response, status)["code"] == code
    expected = {429: "2", 503: "2" if code == "service_unavailable" else "5"}.get(status)
    assert response.headers.get("retry-after") == expected


def test_gpustack_6030_engine_that_is_not_ready_is_503(api):
    api.client.ready = False
    assert error_of(api.chat(), 503)["code"] == "service_unavailable"
    assert not api.client.requests


def failing(request):
    return [
        Delta(request.request_id, byte_tokens("ab")),
        Failed(request.request_id, "rank_failure", "rank 0 died in round 3", status=503),
    ]


def test_failure_inside_a_stream_is_one_error_event_and_no_finish(make_api):
    chunks = make_api(failing).chunks()
    assert chunks[-1] == {
        "error": {
            "message": "rank 0 died in round 3",
            "type": "server_error",
            "param": None,
            "code": "rank_failure",
        }
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_failure_of_a_whole_answer_has_its_status(make_api):
    assert error_of(make_api(failing).chat(), 503)["code"] == "rank_failure"


def test_every_stream_is_closed_and_none_cancelled_after_a_good_end(make_api):
    api = make_api(answer("x"))
    api.chat()
    api.chunks()
    assert not api.client.running
    assert not api.client.cancelled


def test_unexpected_exception_is_500_in_shape_and_says_nothing_internal(make_api):
    def script(request):
        raise ValueError("secret detail")

    response = make_api(script).chat()
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


def test_penalties_bias_and_bans_reach_the_engine(api):
    response = api.chat(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"7": -100, "12": 3},
        min_tokens=4,
        bad_words=["no", " way"],
    )
    assert response.status_code == 200
    spec = api.client.requests[0].sampling
    assert (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) == (
        1.2,
        0.5,
        -1,
    )
    assert spec.logit_bias == ((7, -100.0), (12, 3.0))
    assert spec.min_tokens == 4
    assert spec.bad_words == tuple(map(byte_tokens, ("no", " no", " way", "  way")))


def test_neutral_penalties_ask_for_nothing(api):
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    assert api.chat(**neutral, logit_bias={}, min_tokens=0, bad_words=[]).status_code == 200
    assert api.chat().status_code == 200
    first, second = (request.sampling for request in api.client.requests)
    assert msgspec.structs.replace(first, seed=0) == msgspec.structs.replace(second, seed=0)


def test_chat_choices_share_the_prompt_and_stream_side_by_side(api):
    body = api.chat(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    one = api.chat().json()["usage"]
    assert body["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    chunks = api.chunks(n=3)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine] == [*[None] * (len(mine) - 1), "stop"]


def test_reproducible_mode_reaches_the_engine_on_request(api):
    for fields in ({}, {"reproducible": False}, {"seed": 3}, {"reproducible": True, "seed": 3}):
        assert api.chat(**fields).status_code == 200
    modes = [request.sampling.reproducible for request in api.client.requests]
    assert modes == [False, False, False, True]


@pytest.mark.parametrize(
    "content",
    ["a <think> b", [{"type": "text", "text": "a <th"}, {"type": "text", "text": "ink> b"}]],
)
def test_prediction_reaches_the_engine_as_plain_token_ids(make_api, content):
    api = make_api(answer("why</think>because"))
    assert api.chat(prediction={"type": "content", "content": content}).status_code == 200
    assert api.client.requests[0].prediction == byte_tokens("a <think> b")


def test_usage_counts_the_predictions_own_tokens_where_there_is_one(make_api):
    def script(request):
        *deltas, ended = answer("why</think>because")(request)
        counts = {"drafts_offered": 9, "drafts_accepted": 5}
        copies = {"predicted_offered": 4, "predicted_accepted": 3}
        return [*deltas, msgspec.structs.replace(ended, **counts, **copies)]

    body = make_api(script).chat(prediction={"type": "content", "content": "because"}).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3
    assert details["rejected_prediction_tokens"] == 1

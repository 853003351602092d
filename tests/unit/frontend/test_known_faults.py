"""Faults that users of other servers report, in what HTTP shows; each test carries the report's id.

H-01, H-10 and H-18 stand in test_parser_fuzz.py, test_logprobs.py and test_disconnect.py.
"""

import json

import pytest

from tests.support.fake_engine_client import answer
from tests.unit.frontend.conftest import chat_body, error_of, sse_chunks

USER = {"role": "user", "content": "q"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ROUTES = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "tiny", "prompt": "a"},
    "/v1/responses": {"model": "tiny", "input": "a"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [USER]},
    "/tokenize": {"model": "tiny", "prompt": "a"},
}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_h_05_usage_is_sent_only_where_it_was_asked_for(api, options):
    fields = {} if options is None else {"stream_options": options}
    assert not [chunk for chunk in api.chunks(**fields) if "usage" in chunk]
    *others, last = api.chunks(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert [chunk["usage"] for chunk in others] == [None] * len(others)


@pytest.mark.parametrize("top_k", [-1, 0, 1, 300, 301, 2**31 - 1])
def test_h_17_top_k_beyond_the_vocabulary_means_off(api, top_k):
    assert api.chat(top_k=top_k).status_code == 200
    sampled = api.client.requests[-1].sampling.top_k
    assert sampled in ((1,) if top_k == 1 else (0, 300))
    assert error_of(api.chat(top_k=-2), 400)["param"] == "top_k"


def test_h_15_every_choice_finishes_once_and_is_silent_afterwards(api):
    finished = set()
    chunks = api.chunks(n=3)
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in finished
            if choice["finish_reason"]:
                finished.add(choice["index"])
    assert finished == {0, 1, 2}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_h_16_calls_without_content_are_in_the_prompt_whatever_stands_for_nothing(api):
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    prompts = set()
    for empty in ({"content": None}, {}, {"content": ""}, {"content": []}):
        assert api.chat(messages=[USER, {**CALL, **empty}, result, USER]).status_code == 200
        prompts.add(api.prompt)
    (prompt,) = prompts
    assert "<tool_call>" in prompt


def test_vllm_25001_tool_result_may_be_a_list_of_parts(api):
    prompts = set()
    for content in ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        result = {"role": "tool", "tool_call_id": "c", "content": content}
        assert api.chat(messages=[USER, CALL, result]).status_code == 200
        prompts.add(api.prompt)
    assert len(prompts) == 1


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize(
    "data",
    [
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'{"model": NaN}',
        b"[" * 9000,
        b'{"a":' * 3000,
        b'{"model": "tiny", "messages": ' + b"[" * 4000 + b"]" * 4000 + b"}",
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
        b"",
        b"null",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_probe_12_and_colibri_1589_broken_bodies_are_4xx_before_any_stream(api, path, data, stream):
    if stream and data.endswith(b"}"):
        data = data[:-1] + b', "stream": true}'
    response = api.request("POST", path, content=data)
    assert 400 <= response.status_code < 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"]
    assert not api.client.requests


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("stream", [False, True])
def test_probe_4_and_worker_vllm_57_unknown_model_is_404(api, path, stream):
    body = {**ROUTES[path], "model": "other"}
    if path != "/tokenize":
        body["stream"] = stream
    response = api.post(path, body)
    assert response.status_code == 404
    assert not api.client.requests


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_probe_12_body_above_the_limit_is_413(api, path):
    body = json.dumps({**ROUTES[path], "user": "x" * 30_000})
    assert api.request("POST", path, content=body.encode()).status_code == 413


def test_litellm_37792_parallel_calls_have_indices_and_ids_of_their_own(make_api):
    call = "<tool_call>f</tool_call>"
    api = make_api(answer(f"x</think>{call}{call}{call}"))
    tool = {"type": "function", "function": {"name": "f"}}
    chunks = sse_chunks(api.chat(stream=True, tools=[tool]))
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert sorted({c["index"] for c in calls}) == [0, 1, 2]
    opened = [c for c in calls if "id" in c]
    assert [c["index"] for c in opened] == [0, 1, 2]
    assert len({c["id"] for c in opened}) == 3

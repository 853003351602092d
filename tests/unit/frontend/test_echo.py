"""`echo` and prompt log-probabilities in answers and streams (contract: K4; known fault H-12)."""

import json

import pytest
from msgspec.structs import replace

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.stream import merge_deltas
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import error_of, sse_chunks

PROMPT = "né abc"
OUTPUT = "xyz"


def scored(logprob, token, count):
    return TokenScore(logprob, (token, 7)[:count], (logprob, -9.0)[:count])


def script(request):
    """Scores of the prompt where asked for, then OUTPUT token by token."""
    prompt = request.prompt_tokens
    if request.prompt_logprobs >= 0 and len(prompt) > 1:
        scores = tuple(
            scored(-place / 4, token, request.prompt_logprobs)
            for place, token in enumerate(prompt[1:], start=1)
        )
        yield Delta(request.request_id, (), prompt_scores=scores)
    tokens = byte_tokens(OUTPUT)[: request.max_tokens]
    for place, token in enumerate(tokens):
        own = scored(-5.0 - place, token, request.top_logprobs)
        scores = (own,) if request.top_logprobs >= 0 else ()
        yield Delta(request.request_id, (token,), 0, scores)
    yield Finished(request.request_id, "stop", len(prompt), len(tokens) + 1)


@pytest.fixture
def api(make_api):
    return make_api(script)


def strict(response):
    assert response.status_code == 200, response.text
    return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"JSON holds {name}"))


def test_h12_echo_with_logprobs_and_no_output_scores_every_prompt_token_but_the_first(api):
    body = strict(api.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1))
    [choice] = body["choices"]
    count = len(byte_tokens(PROMPT))
    found = choice["logprobs"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert {len(values) for values in found.values()} == {count}
    assert found["token_logprobs"] == [None, *(-place / 4 for place in range(1, count))]
    assert found["top_logprobs"][0] is None and all(found["top_logprobs"][1:])
    assert found["text_offset"][0] == 0 and found["text_offset"][-1] == len(PROMPT) - 1
    assert body["usage"]["completion_tokens"] == 0
    assert api.client.requests[-1].prompt_logprobs == 1


def test_h12_prompt_logprobs_are_one_entry_a_token_with_one_null(api):
    body = strict(api.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=2))
    [choice] = body["choices"]
    tokens = byte_tokens(PROMPT)
    assert (choice["text"], choice["logprobs"]) == ("", None)
    entries = choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(tokens)
    for place, (token, entry) in enumerate(zip(tokens[1:], entries[1:], strict=True), start=1):
        assert entry[str(token)]["logprob"] == -place / 4
        assert entry[str(token)]["rank"] == 1 and entry["7"]["rank"] == 2


def test_prompt_logprobs_without_alternatives_hold_the_prompts_own_tokens(api):
    body = strict(api.chat(prompt_logprobs=0))
    entries = body["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert all(len(e) == 1 and next(iter(e.values()))["rank"] is None for e in entries[1:])


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_echo_equals_the_whole_answer(api, logprobs, n):
    fields = {"prompt": PROMPT, "echo": True, "n": n, "logprobs": logprobs}
    whole = strict(api.complete(**fields))["choices"]
    parts = [chunk["choices"][0] for chunk in sse_chunks(api.complete(stream=True, **fields))]
    for index in range(n):
        own = [part for part in parts if part["index"] == index]
        assert own[0]["text"].startswith(PROMPT)
        assert "".join(part["text"] for part in own) == whole[index]["text"] == PROMPT + OUTPUT
        if logprobs is not None:
            for name, values in whole[index]["logprobs"].items():
                assert [v for part in own for v in part["logprobs"][name]] == values


@pytest.mark.parametrize("stream", [False, True])
def test_eos_that_ends_a_scored_echo_has_an_entry_and_no_text(make_api, stream):
    """Scorers of texts leave out one entry for the token that they ask for."""

    def ends(request):
        *deltas, finished = script(request)
        return [
            deltas[0],
            replace(finished, ender=270, ender_score=TokenScore(-0.5, (270,), (-0.5,))),
        ]

    fields = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 1, "stream": stream}
    response = make_api(ends).complete(echo=True, **fields)
    chunks = sse_chunks(response) if stream else [strict(response)]
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    count = len(byte_tokens(PROMPT))
    scores = [score for entry in entries for score in entry["token_logprobs"]]
    assert scores == [None, *(-place / 4 for place in range(1, count)), -0.5]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT
    assert entries[-1]["text_offset"][-1] == len(PROMPT)
    plain = make_api(ends).complete(**fields | {"stream": False}).json()["choices"][0]
    assert plain["logprobs"]["token_logprobs"] == [-5.0]


def test_echo_without_scores_needs_no_engine_where_nothing_is_generated(api):
    body = strict(api.complete(prompt=[PROMPT, "b"], max_tokens=0, echo=True))
    assert [choice["text"] for choice in body["choices"]] == [PROMPT, "b"]
    assert api.client.requests == []


def test_echo_of_token_ids_is_their_text(api):
    body = strict(api.complete(prompt=list(byte_tokens(PROMPT)), echo=True))
    assert body["choices"][0]["text"] == PROMPT + OUTPUT


def test_prompt_of_one_token_has_one_null(api):
    body = strict(api.complete(prompt="a", max_tokens=0, echo=True, logprobs=0))
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None]


def test_chats_have_no_echo(api):
    assert error_of(api.chat(echo=True), 400)["param"] == "echo"


def test_prompt_logprobs_of_a_stream_are_refused_by_name(api):
    error = error_of(api.complete(prompt_logprobs=1, stream=True), 400)
    assert error["param"] == "prompt_logprobs" and "stream" in error["message"]


@pytest.mark.parametrize("value", [-1, 21, True, "1"])
def test_wrong_number_of_prompt_alternatives_is_refused(api, value):
    assert error_of(api.complete(prompt_logprobs=value), 400)["param"] == "prompt_logprobs"


def test_joined_deltas_keep_the_prompts_scores():
    scores = (TokenScore(-1.0), TokenScore(-2.0))
    first = Delta("r", (), prompt_scores=scores)
    joined = [Delta("r", (1, 2), 0, (), scores)]
    assert merge_deltas([first, Delta("r", (1,)), Delta("r", (2,))]) == joined

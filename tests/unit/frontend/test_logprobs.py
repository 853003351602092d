"""Log-probabilities in answers and streams: known faults H-10, H-11, and the shapes of OpenAI."""

import json

import pytest

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from flare_ray.frontend.openai.logprobs import FLOOR
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import error_of, sse_chunks

TEXT = "</think>né €!"


def script(step):
    """Emits TEXT by `step` tokens; token number i has log-probability -i/8, and its neighbours."""

    def run(request):
        tokens = byte_tokens(TEXT)
        scores = [
            TokenScore(-place / 8, (token, 5), (-place / 8, float("-inf")))
            if request.top_logprobs
            else TokenScore(-place / 8)
            for place, token in enumerate(tokens)
        ]
        for first in range(0, len(tokens), step):
            own = scores[first : first + step] if request.top_logprobs >= 0 else ()
            yield Delta(request.request_id, tokens[first : first + step], 0, tuple(own))
            yield 0.0
        yield Finished(request.request_id, "stop", 3, len(tokens) + 1)

    return run


def strict_json(response):
    return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"JSON holds {name}"))


@pytest.mark.parametrize("step", [1, 3, 5, 100])
def test_chat_has_one_entry_per_token_in_answer_and_stream(make_api, step):
    api = make_api(script(step))
    body = strict_json(api.chat(logprobs=True, top_logprobs=2))
    entries = body["choices"][0]["logprobs"]["content"]
    assert api.client.requests[-1].top_logprobs == 2
    assert bytes(b for entry in entries for b in entry["bytes"]) == TEXT.encode()
    assert [entry["logprob"] for entry in entries] == [-i / 8 for i in range(len(entries))]
    for entry in entries:
        assert [a["logprob"] for a in entry["top_logprobs"]] == [entry["logprob"], FLOOR]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    chunks = api.chunks(logprobs=True, top_logprobs=2)
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == entries


@pytest.mark.parametrize("step", [1, 4, 100])
def test_text_completion_has_one_entry_per_token_in_answer_and_stream(make_api, step):
    api = make_api(script(step))
    found = strict_json(api.complete(logprobs=2))["choices"][0]["logprobs"]
    count = len(byte_tokens(TEXT))
    assert {len(values) for values in found.values()} == {count}
    assert found["token_logprobs"] == [-i / 8 for i in range(count)]
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][-1] == len(TEXT) - 1
    assert all(min(best.values()) == FLOOR for best in found["top_logprobs"])
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in sse_chunks(api.complete(logprobs=2, stream=True))
    ]
    for name, values in found.items():
        assert [v for part in parts for v in part[name]] == values


def test_logprobs_without_alternatives(make_api):
    api = make_api(script(2))
    entries = api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert api.client.requests[-1].top_logprobs == 0
    assert all(entry["top_logprobs"] == [] for entry in entries)
    found = api.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert all(best == {} for best in found["top_logprobs"])


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"top_logprobs": 0}])
def test_nothing_is_reported_unasked(make_api, fields):
    api = make_api(script(2))
    assert api.chat(**fields).json()["choices"][0]["logprobs"] is None
    assert all(c["choices"][0]["logprobs"] is None for c in api.chunks(**fields))
    assert api.client.requests[-1].top_logprobs == -1
    assert api.complete().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("value", [-1, 21, True, "2"])
def test_wrong_number_of_alternatives_is_refused(api, value):
    assert error_of(api.complete(logprobs=value), 400)["param"] == "logprobs"

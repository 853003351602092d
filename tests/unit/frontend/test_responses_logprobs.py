"""Log-probabilities of the Responses API: those of the tokens that messages consist of."""

import pytest

from flare_ray.contracts.messages import Delta, Finished
from flare_ray.contracts.record import TokenScore
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import error_of, named_events

WANTED = {"include": ["message.output_text.logprobs"]}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def scored(text, *, step, trim_bytes=0):
    """Token number i has log-probability -i, and its place tells it from all others."""

    def script(request):
        tokens = byte_tokens(text)
        told = request.top_logprobs
        known = [
            TokenScore(-float(i), (t,)[:told], (-float(i),)[:told]) for i, t in enumerate(tokens)
        ]
        starts = range(0, len(tokens), step)
        deltas = [
            Delta(
                request.request_id,
                tokens[at : at + step],
                trim_bytes if at == starts[-1] else 0,
                tuple(known[at : at + step]),
            )
            for at in starts
        ]
        return [*deltas, Finished(request.request_id, "stop", 9, len(tokens) + 1)]

    return script


def respond(api, **fields):
    return api.post("/v1/responses", {"model": "tiny", "input": "hi", **fields})


def places(entries):
    """Places of the tokens in the whole output, by their log-probabilities."""
    return [int(-entry["logprob"]) for entry in entries]


def spelled(entries):
    return bytes(byte for entry in entries for byte in entry["bytes"])


@pytest.mark.parametrize("step", [1, 3, 500])
@pytest.mark.parametrize("stream", [False, True])
def test_entries_spell_the_text_and_nothing_else(make_api, step, stream):
    api = make_api(scored("why €</think>\nbecause € now", step=step))
    answered = respond(api, stream=stream, top_logprobs=1, **WANTED)
    body = named_events(answered)[-1]["response"] if stream else answered.json()
    assert body["top_logprobs"] == 1
    (part,) = body["output"][1]["content"]
    assert part["text"] == "\nbecause € now"
    assert spelled(part["logprobs"]) == part["text"].encode()
    first = len(byte_tokens("why €</think>"))
    assert places(part["logprobs"]) == list(range(first, first + len(part["text"].encode())))
    assert all(e["top_logprobs"][0]["logprob"] == e["logprob"] for e in part["logprobs"])
    assert api.client.requests[0].top_logprobs == 1


@pytest.mark.parametrize("step", [1, 7])
def test_streamed_entries_stand_beside_the_text_they_complete(make_api, step):
    found = named_events(
        respond(make_api(scored("x</think>a€b€", step=step)), stream=True, **WANTED)
    )
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert [spelled(e["logprobs"]).decode() for e in deltas] == [e["delta"] for e in deltas]
    done = next(e for e in found if e["type"] == "response.output_text.done")
    assert done["logprobs"] == [entry for e in deltas for entry in e["logprobs"]]
    assert found[-1]["response"]["output"][1]["content"][0]["logprobs"] == done["logprobs"]
    assert all(entry["top_logprobs"] == [] for entry in done["logprobs"])


@pytest.mark.parametrize("step", [1, 5])
def test_messages_around_a_call_have_their_own_tokens(make_api, step):
    text = f"x</think>before{CALL} behind"
    body = respond(make_api(scored(text, step=step)), tools=[TOOL], **WANTED).json()
    kinds = [item["type"] for item in body["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message"]
    for item, words in ((body["output"][1], "before"), (body["output"][3], " behind")):
        (part,) = item["content"]
        assert part["text"] == words
        start = text.index(words)
        assert places(part["logprobs"]) == list(range(start, start + len(words)))


def test_layout_before_a_call_is_no_message_and_has_no_entries(make_api):
    body = respond(make_api(scored(f"x</think>\n\n{CALL}\nso", step=1)), tools=[TOOL], **WANTED)
    message = body.json()["output"][-1]["content"][0]
    assert spelled(message["logprobs"]).decode() == message["text"] == "\nso"


def test_half_a_character_at_the_end_keeps_its_token(make_api):
    half = "ab€"
    body = respond(make_api(scored("x</think>" + half, step=1, trim_bytes=1)), **WANTED).json()
    (part,) = body["output"][1]["content"]
    assert part["text"] == "ab�"
    assert places(part["logprobs"])[:3] == [9, 10, 11]
    assert len(part["logprobs"]) == 5


def test_nothing_is_told_unless_it_is_asked_for(make_api):
    api = make_api()
    assert respond(api, include=[]).json()["output"][0]["content"][0].get("logprobs", []) == []
    assert api.client.requests[0].top_logprobs == -1
    assert respond(api, include=None, top_logprobs=0).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"include": [*WANTED["include"], "file_search_call.results"]}, "include[1]"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": [7]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, **WANTED}, "top_logprobs"),
        ({"top_logprobs": -1, **WANTED}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_included_is_named(api, fields, param, stream):
    error = error_of(respond(api, stream=stream, **fields), 400)
    assert error["param"] == param
    assert not api.client.requests

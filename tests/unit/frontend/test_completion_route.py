"""Text completions, model list, health and metrics over a scripted engine."""

import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import error_of, sse_chunks


def test_text_completion(make_api):
    api = make_api(answer("</think> def"))
    body = api.complete(prompt="abc").json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "</think> def",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert api.client.requests[0].prompt_tokens == byte_tokens("abc")


def test_token_ids_are_taken_as_they_are(api):
    api.complete(prompt=[5, 6, 7])
    assert api.client.requests[0].prompt_tokens == (5, 6, 7)


def echo(request):
    """Answers with the prompt's own tokens, longer prompts in more pieces."""
    pieces = [Delta(request.request_id, (token,)) for token in request.prompt_tokens]
    count = len(request.prompt_tokens)
    return [*pieces, 0.0, Finished(request.request_id, "length", count, count)]


@pytest.mark.parametrize("prompt", [["ab", "cde", "f"], [[1, 2], [3], [4, 5, 6]]])
def test_several_prompts_are_several_choices(make_api, prompt):
    api = make_api(echo)
    body = api.complete(prompt=prompt).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    if isinstance(prompt[0], str):
        assert [choice["text"] for choice in body["choices"]] == prompt
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 6
    assert len({request.request_id for request in api.client.requests}) == 3


def test_several_prompts_stream_with_one_finish_each_and_nothing_after_it(make_api):
    api = make_api(echo)
    response = api.complete(prompt=["ab", "cdefgh", "i"], stream=True)
    chunks = sse_chunks(response)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, text in enumerate(["ab", "cdefgh", "i"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert [c["finish_reason"] for c in mine] == [*[None] * (len(mine) - 1), "length"]


def test_failure_of_one_prompt_ends_all_and_cancels_the_rest(make_api):
    def script(request):
        if request.prompt_tokens == (1,):
            return [Failed(request.request_id, "nonfinite_logits", "no finite logits")]
        return [0.01, 30.0]

    api = make_api(script)
    assert error_of(api.complete(prompt=[[2], [1], [3]]), 500)["message"] == "no finite logits"
    assert not api.client.running
    assert len(api.client.cancelled) == 2


def test_budget_of_nothing_is_empty_text_without_engine_work(api):
    body = api.complete(max_tokens=0).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert not api.client.requests
    assert error_of(api.complete(max_tokens=0, top_p=7), 400)["param"] == "top_p"


def test_budget_of_nothing_streams_too(api):
    chunks = sse_chunks(api.complete(max_tokens=0, stream=True))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]


def test_probe_5_model_list_names_the_served_model(api):
    body = api.get("/v1/models").json()
    assert [entry["id"] for entry in body["data"]] == ["tiny"]
    assert body["data"][0]["max_model_len"] == 512
    assert api.get("/v1/models/tiny").json()["id"] == "tiny"
    assert error_of(api.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


def test_probe_6_freetoken_537_and_gpustack_6203_nothing_is_ready_before_an_engine_is(api):
    assert api.get("/health").status_code == 200
    api.client.ready = False
    response = api.get("/health")
    assert error_of(response, 503)["message"] == "the engine is starting"
    assert response.headers["retry-after"] == "5"
    assert api.get("/v1/models").status_code == 503
    assert api.get("/health/live").status_code == 200


def test_metrics_are_prometheus_text(api):
    from prometheus_client.parser import text_string_to_metric_families

    response = api.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert [family.name for family in text_string_to_metric_families(response.text)] == ["up"]


def by_seed(request):
    """Answers with letters that the request's seed chooses."""
    tokens = [(request.sampling.seed >> (5 * place)) % 26 + 65 for place in range(6)]
    return [Delta(request.request_id, byte_tokens(bytes(tokens))), finish(request, 6)]


def finish(request, count, reason="length"):
    return Finished(request.request_id, reason, len(request.prompt_tokens), count)


def texts(response):
    return [choice["text"] for choice in response.json()["choices"]]


def test_choices_of_a_seed_differ_from_each_other_and_repeat(make_api):
    api = make_api(by_seed)
    first = texts(api.complete(n=4, seed=7))
    assert len(set(first)) == 4
    assert texts(api.complete(n=4, seed=7)) == first
    assert texts(api.complete(seed=7)) == first[:1]
    assert set(texts(api.complete(n=4, seed=8))).isdisjoint(first)
    assert set(texts(api.complete(n=4))).isdisjoint(first)


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(make_api):
    api = make_api(echo)
    response = api.complete(prompt=["ab", "cde"], n=2)
    assert texts(response) == ["ab", "ab", "cde", "cde"]
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 10)
    assert len({request.request_id for request in api.client.requests}) == 4


def test_finish_reason_once_per_choice_when_they_end_in_different_rounds(make_api):
    """Known fault H-15: duplicate finish chunks, and only the last index got one."""
    ids = []

    def script(request):
        ids.append(request.request_id)
        place = len(ids)
        pieces = [Delta(request.request_id, byte_tokens("x")) for _ in range(place)]
        steps = [step for piece in pieces for step in (piece, 0.0)]
        return [*steps, finish(request, place, "stop")]

    chunks = sse_chunks(make_api(script).complete(prompt="q", n=3, stream=True))
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in mine] == [*[None] * (len(mine) - 1), "stop"]


def test_more_choices_than_one_request_may_have_are_refused(api):
    assert error_of(api.complete(prompt=["a"] * 33, n=2), 400)["param"] == "n"

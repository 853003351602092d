"""/tokenize, /detokenize, and the routes that are refused by name."""

import pytest

from flare_ray.frontend.openai.refused import REFUSED
from tests.support.fake_engine_client import byte_tokens
from tests.unit.frontend.conftest import error_of

USER = {"role": "user", "content": "hi <|end|>"}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_prompt_becomes_its_tokens(api, path):
    body = api.post(path, {"model": "tiny", "prompt": "a€"}).json()
    assert body["tokens"] == list(byte_tokens("a€"))
    assert body["count"] == 4
    assert body["max_model_len"] == api.client.engine_info.context_tokens
    assert body["token_strs"] is None
    assert not api.client.requests


def test_token_spellings_are_given_on_request(api):
    body = api.post("/tokenize", {"prompt": "ab<|end|>", "return_token_strs": True}).json()
    assert body["token_strs"] == ["a", "b", "<|end|>"]


def test_conversation_becomes_the_prompt_that_the_engine_would_get(api):
    tool = {"type": "function", "function": {"name": "f"}}
    fields = {"messages": [USER], "tools": [tool], "reasoning_effort": "low"}
    body = api.post("/tokenize", {"model": "tiny", **fields}).json()
    assert api.chat(**fields).status_code == 200
    assert tuple(body["tokens"]) == api.client.requests[-1].prompt_tokens


def test_conversation_beyond_the_context_is_counted(api):
    long = [{"role": "user", "content": "x" * 5000}]
    assert api.post("/tokenize", {"messages": long}).json()["count"] > 5000


def test_detokenize_is_the_inverse(api):
    tokens = api.post("/tokenize", {"prompt": "a€ <think><|end|>"}).json()["tokens"]
    body = api.post("/detokenize", {"model": "tiny", "tokens": tokens}).json()
    assert body == {"prompt": "a€ <think><|end|>"}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_ids_that_only_pad_the_vocabulary_have_no_text(api):
    assert api.post("/detokenize", {"tokens": [299]}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [300]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
def test_wrong_field_is_400_and_named(api, path, body, param):
    assert error_of(api.post(path, body), 400)["param"] == param


def test_unknown_model_is_404(api):
    body = {"model": "other", "prompt": "a"}
    assert error_of(api.post("/tokenize", body), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("rest", ["", "/x/y"])
def test_route_that_is_not_served_is_refused_by_name(api, name, rest):
    for method in ("GET", "DELETE", *(("POST",) if rest else ())):
        response = api.request(method, f"/v1/{name}{rest}")
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["message"].startswith(f"/v1/{name}: ")
        # The other API's errors have no code.
        assert name.startswith("messages") or error["code"] == "unsupported_endpoint"


def test_request_id_comes_back_in_every_answer(api):
    given = {"x-request-id": "mine-1"}
    for response in (
        api.request("GET", "/v1/models", headers=given),
        api.request("POST", "/v1/embeddings", headers=given),
        api.request("POST", "/tokenize", json={"prompt": "a"}, headers=given),
    ):
        assert response.headers["x-request-id"] == response.headers["request-id"] == "mine-1"
    assert len(api.get("/v1/models").headers["x-request-id"]) == 32

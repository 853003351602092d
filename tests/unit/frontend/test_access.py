"""API keys and rate limits: who is let in, and what a refused client is told."""

import ast
import asyncio
import dataclasses
import hashlib
import json
import logging
import math

import pytest

from flare_ray.contracts.messages import Delta, Failed
from flare_ray.errors import ConfigError
from flare_ray.frontend.access import Access, LocalLedger
from flare_ray.frontend.access import keys as key_files
from flare_ray.frontend.access.keys import KeyRing
from flare_ray.frontend.access.ledger import Limits
from tests.rules.sources import python_sources
from tests.support.fake_engine_client import answer, byte_tokens
from tests.unit.frontend.conftest import chat_body, error_of, sse_chunks

SECRET = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


@pytest.fixture
def guard(make_api, tmp_path, clock):
    """An API that a key file guards; `path` and `clock` are attributes."""

    def make(*keys, script=None):
        path = tmp_path / "keys.yaml"
        path.write_text(json.dumps({"keys": keys or [{"name": "a", "key": SECRET}]}))
        api = make_api(script)
        access = Access(KeyRing(path, clock=clock), ledger=LocalLedger(clock))
        api.settings = dataclasses.replace(api.settings, access=access)
        api.path = path
        return api

    return make


def chat(api, secret=SECRET, **fields):
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return api.request("POST", "/v1/chat/completions", json=chat_body(**fields), headers=headers)


def test_key_of_the_file_lets_in_by_either_header(guard):
    api = guard()
    assert chat(api).status_code == 200
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for path, sent in (("/v1/chat/completions", chat_body()), ("/v1/messages", body)):
        for headers in ({"x-api-key": SECRET}, {"Authorization": f"bearer {SECRET}"}):
            assert api.request("POST", path, json=sent, headers=headers).status_code == 200


@pytest.mark.parametrize("secret", [None, "", "x", OTHER, SECRET + "0", "é" * 20])
@pytest.mark.parametrize("stream", [False, True])
def test_any_other_key_is_401_in_the_shape_of_the_api(guard, secret, stream):
    api = guard()
    headers = [] if secret is None else [(b"authorization", f"Bearer {secret}".encode())]
    response = api.request(
        "POST", "/v1/chat/completions", json=chat_body(stream=stream), headers=headers
    )
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    response = api.request("POST", "/v1/messages", json={}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert not api.client.requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/v1/detokenize"),
    ],
)
def test_every_route_of_the_apis_needs_a_key(guard, method, path):
    assert guard().request(method, path).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics"])
def test_probes_and_scrapers_need_none(guard, path):
    assert guard().get(path).status_code == 200


def test_file_may_hold_the_digest_instead(guard):
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    api = guard({"name": "a", "key_sha256": digest})
    assert chat(api).status_code == 200
    assert chat(api, digest).status_code == 401


def test_every_key_is_compared_whichever_fits(guard, monkeypatch):
    compared = []

    def compare(ours, theirs):
        compared.append(theirs)
        return ours == theirs

    monkeypatch.setattr(key_files.hmac, "compare_digest", compare)
    keys = [{"name": f"k{i}", "key": f"{SECRET}{i}"} for i in range(5)]
    api = guard(*keys)
    for secret in (f"{SECRET}0", f"{SECRET}4", "none"):
        compared.clear()
        chat(api, secret)
        assert len(compared) == 5


def test_changed_file_is_in_force_without_a_restart(guard, clock):
    api = guard()
    api.path.write_text(json.dumps({"keys": [{"name": "b", "key": OTHER}]}))
    assert chat(api).status_code == 200
    clock.now_s += key_files.RELOAD_S
    assert chat(api).status_code == 401
    assert chat(api, OTHER).status_code == 200


@pytest.mark.parametrize("text", [None, "", "keys: [", "keys: []", '{"keys": [{"name": "a"}]}'])
def test_broken_change_keeps_the_keys_and_is_logged_once(guard, clock, caplog, text):
    api = guard()
    if text is None:
        api.path.unlink()
    else:
        api.path.write_text(text)
    for _ in range(3):
        clock.now_s += key_files.RELOAD_S
        assert chat(api).status_code == 200
        assert chat(api, OTHER).status_code == 401
    assert caplog.text.count("stay in force") == 1


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"name": "a"}],
        [{"name": "a", "key": "short"}],
        [{"name": "a b", "key": SECRET}],
        [{"name": "a", "key": SECRET, "key_sha256": "0" * 64}],
        [{"name": "a", "key": SECRET}, {"name": "a", "key": OTHER}],
        [{"name": "a", "key": SECRET}, {"name": "b", "key": SECRET}],
        [{"name": "a", "key": SECRET, "requests_per_minute": 0}],
        [{"name": "a", "key": SECRET, "colour": 1}],
    ],
)
def test_broken_file_stops_the_start_and_never_shows_a_secret(tmp_path, keys):
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": keys}))
    with pytest.raises(ConfigError) as caught:
        KeyRing(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_requests_above_the_limit_are_429_and_the_wait_told_is_enough(guard, clock):
    api = guard({"name": "a", "key": SECRET, "requests_per_minute": 3})
    assert [chat(api).status_code for _ in range(4)] == [200, 200, 200, 429]
    response = chat(api, stream=True)
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    wait_s = int(response.headers["retry-after"])
    assert wait_s == 20
    clock.now_s += wait_s - 1
    assert chat(api).status_code == 429
    clock.now_s += 1
    assert chat(api).status_code == 200
    assert len(api.client.requests) == 4


def test_limits_of_one_key_do_not_touch_another(guard):
    limited = {"name": "a", "key": SECRET, "requests_per_minute": 1}
    api = guard(limited, {"name": "b", "key": OTHER})
    assert [chat(api).status_code for _ in range(2)] == [200, 429]
    assert [chat(api, OTHER).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_output_tokens_are_counted(guard, clock, stream):
    api = guard({"name": "a", "key": SECRET, "tokens_per_minute": 1000}, script=answer("x" * 990))
    response = chat(api, stream=stream)
    if stream:
        sse_chunks(response)
    prompt = len(api.client.requests[0].prompt_tokens)
    debt = prompt + 991 - 1000
    refused = chat(api, stream=stream)
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
    wait_s = int(refused.headers["retry-after"])
    assert wait_s == math.ceil((debt + prompt) * 60 / 1000)
    clock.now_s += wait_s
    assert chat(api, stream=stream).status_code == 200
    assert len(api.client.requests) == 2


def test_output_of_a_request_that_failed_half_way_is_counted(guard):
    def script(request):
        yield Delta(request.request_id, byte_tokens("x" * 800))
        raise RuntimeError("gone")

    api = guard({"name": "a", "key": SECRET, "tokens_per_minute": 800}, script=script)
    assert chat(api).status_code == 500
    assert chat(api).status_code == 429


def test_output_that_went_past_the_reader_is_counted(guard):
    def script(request):
        yield 0.0
        yield Delta(request.request_id, byte_tokens("x" * 800))
        yield Failed(request.request_id, "rank_failure", "gone", status=503)

    api = guard({"name": "a", "key": SECRET, "tokens_per_minute": 800}, script=script)
    assert "gone" in chat(api, stream=True).text
    assert api.client.bypassed == 1
    assert chat(api).status_code == 429


def test_prompt_that_never_fits_is_not_told_to_wait(guard):
    api = guard({"name": "a", "key": SECRET, "tokens_per_minute": 10})
    response = chat(api)
    assert error_of(response, 400)["code"] == "rate_limit_exceeded"
    assert "retry-after" not in response.headers


def test_changed_limit_is_in_force_at_once(clock):
    ledger = LocalLedger(clock)

    def take(limit):
        return asyncio.run(ledger.take("a", Limits(limit, None), requests=1, tokens=0))

    assert [take(1), take(1) > 0, take(5), take(None)] == [0.0, True, 0.0, 0.0]


def test_anthropic_clients_are_told_their_limit_as_429(guard):
    api = guard({"name": "a", "key": SECRET, "requests_per_minute": 1})
    headers = {"x-api-key": SECRET}
    assert api.request("POST", "/v1/messages", json={}, headers=headers).status_code == 400
    response = api.request("POST", "/v1/messages", json={}, headers=headers)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "60"


def test_priority_is_that_of_the_key_and_no_lower_one_may_be_asked_for(guard):
    api = guard({"name": "a", "key": SECRET, "lowest_priority": -3})
    assert chat(api).status_code == 200
    assert chat(api, priority=5).status_code == 200
    assert error_of(chat(api, priority=-4), 403)["param"] == "priority"
    assert [request.priority for request in api.client.requests] == [-3, 5]


def test_share_under_load_is_that_of_the_key(guard):
    api = guard(
        {"name": "a", "key": SECRET, "weight": 2.5}, {"name": "b", "key": OTHER, "cache_salt": "s"}
    )
    for secret in (SECRET, OTHER):
        assert chat(api, secret).status_code == 200
    shares = [(request.tenant, request.weight) for request in api.client.requests]
    assert shares == [("a", 2.5), ("b", 1.0)]


def test_without_keys_everybody_is_one_tenant(api):
    api.chat(priority=1)
    assert (api.client.requests[0].tenant, api.client.requests[0].weight) == ("", 1.0)


@pytest.mark.parametrize("weight", [0, -1, "much", 1e9])
def test_key_file_with_a_nonsensical_weight_is_refused_by_name(tmp_path, weight):
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "a", "key": SECRET, "weight": weight}]}))
    with pytest.raises(ConfigError, match="weight"):
        KeyRing(path)


def test_priority_without_keys_is_what_was_asked_for(api):
    api.chat(priority=-7)
    api.complete(priority=2**31 - 1)
    api.chat()
    assert [request.priority for request in api.client.requests] == [-7, 2**31 - 1, 0]
    assert error_of(api.chat(priority=2**31), 400)["param"] == "priority"


def test_prefixes_are_shared_within_a_salt_only(guard, make_api):
    salted = {"name": "a", "key": SECRET, "cache_salt": "s"}
    api = guard(salted, {"name": "b", "key": OTHER})
    for secret, fields in ((SECRET, {}), (SECRET, {"cache_salt": "s"}), (OTHER, {})):
        chat(api, secret, **fields)
    chat(api, OTHER, cache_salt="s")
    salts = [request.cache_salt for request in api.client.requests]
    assert salts[0] == "s"
    assert salts[2] == ""
    assert len(set(salts)) == 4


def test_neither_prompts_nor_answers_nor_keys_are_logged(guard, caplog):
    caplog.set_level(logging.DEBUG)
    api = guard(script=answer("secret answer"))
    hidden = [{"role": "user", "content": "secret question"}]
    assert chat(api, messages=hidden).status_code == 200
    assert chat(api, messages=hidden, top_k="secret parameter").status_code == 400
    assert chat(api, OTHER, messages=hidden).status_code == 401
    assert "key a" in caplog.text
    assert not [word for word in ("secret", SECRET, OTHER) if word in caplog.text]


def test_nothing_in_the_package_can_unpickle():
    """Engines and HTTP replicas exchange msgpack; what a client sends stays data."""
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for source in python_sources("flare_ray"):
        for node in ast.walk(source.tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [n for n in names if banned & set(n.split("."))], source.path

"""Cache statistics and reset for administrators over HTTP."""

import pytest

from flare_ray.contracts.tiers import Tier
from flare_ray.frontend.admin import KEY_VARIABLE
from tests.unit.frontend.conftest import error_of

KEY = "long and secret"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def open_api(api, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return api


def test_statistics_name_every_tier_of_every_engine(open_api):
    answer = open_api.request("GET", "/admin/cache", headers=BEARER)
    assert answer.status_code == 200
    [engine] = answer.json()["engines"]
    assert engine["engine_id"] == "engine-1" and engine["hit_tokens"] == 128
    assert engine["tiers"][0]["tier"] == "device" and engine["tiers"][0]["restored_bytes"] == 1200


@pytest.mark.parametrize(
    ("body", "tiers"),
    [
        (None, set(Tier)),
        ({}, set(Tier)),
        ({"tiers": ["host", "disk"]}, {Tier.HOST, Tier.DISK}),
        ({"tiers": ["device"]}, {Tier.DEVICE}),
    ],
)
def test_reset_reaches_the_named_tiers(open_api, body, tiers):
    fields = {} if body is None else {"json": body}
    answer = open_api.request("POST", "/admin/cache/reset", headers=BEARER, **fields)
    assert answer.status_code == 200, answer.text
    assert open_api.client.resets == [tiers]
    assert answer.json()["engines"][0]["dropped"] == {tier.value: 1 for tier in tiers}


@pytest.mark.parametrize("body", [{"tiers": ["gpu"]}, {"tiers": []}, {"tiers": "host"}, {"all": 1}])
def test_reset_of_what_does_not_exist_is_refused(open_api, body):
    answer = open_api.request("POST", "/admin/cache/reset", headers=BEARER, json=body)
    assert answer.status_code == 400 and not open_api.client.resets


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/reset")])
def test_administration_is_closed_without_a_key(api, monkeypatch, method, path):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    answer = api.request(method, f"/admin/cache{path}", headers=BEARER)
    assert KEY_VARIABLE in error_of(answer, 403)["message"]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}]
)
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/reset")])
def test_administration_needs_the_right_key(open_api, method, path, headers):
    answer = open_api.request(method, f"/admin/cache{path}", headers=headers)
    assert answer.status_code == 401 and not open_api.client.resets

"""A request that engines died of is refused, and others are not (contract: A4)."""

import msgspec
import pytest

from flare_ray.errors import InvalidRequest
from flare_ray.frontend.quarantine import MAX_SUSPECTS, ONE_DEATH_S, QUARANTINE_S, Quarantine
from tests.unit.frontend.test_remote_client import REQUEST, collect, run, short_waits

fast = short_waits
"""The client's own waits, shortened."""
OTHER = msgspec.structs.replace(REQUEST, prompt_tokens=(3, 4))
AGAIN = msgspec.structs.replace(
    REQUEST, request_id="again", sampling=msgspec.structs.replace(REQUEST.sampling, seed=99)
)
"""The same work under another id and seed, as a client's retry asks for it."""


@pytest.fixture
def quarantine(clock):
    return Quarantine(clock)


def die(quarantine, clock, *requests):
    for request in requests:
        quarantine.died(request)
    clock.now_s += 2 * ONE_DEATH_S


def test_two_deaths_quarantine_a_request_whatever_its_id_and_seed(quarantine, clock):
    die(quarantine, clock, REQUEST)
    quarantine.check(AGAIN)
    die(quarantine, clock, AGAIN)
    with pytest.raises(InvalidRequest, match="died 2 times") as refused:
        quarantine.check(REQUEST)
    assert (refused.value.status, refused.value.code) == (422, "quarantined_request")
    quarantine.check(OTHER)


def test_choices_that_saw_one_death_count_once(quarantine, clock):
    die(quarantine, clock, REQUEST, AGAIN, AGAIN)
    quarantine.check(REQUEST)


def test_a_request_that_an_engine_survives_is_cleared(quarantine, clock):
    die(quarantine, clock, REQUEST)
    quarantine.survived(AGAIN)
    die(quarantine, clock, REQUEST)
    quarantine.check(REQUEST)


def test_quarantine_ends(quarantine, clock):
    die(quarantine, clock, REQUEST)
    die(quarantine, clock, REQUEST)
    clock.now_s += QUARANTINE_S
    quarantine.check(REQUEST)


def test_the_list_is_bounded(quarantine, clock):
    for token in range(2 * MAX_SUSPECTS):
        quarantine.died(msgspec.structs.replace(REQUEST, prompt_tokens=(token,)))
    assert len(quarantine._suspects) == MAX_SUSPECTS


def test_client_refuses_the_retry_of_a_request_that_killed_two_engines(monkeypatch):
    monkeypatch.setattr("flare_ray.frontend.quarantine.ONE_DEATH_S", 0.0)

    def behave(call, number):
        call.admit()
        call.fail(on_stream=True)

    async def scenario(cluster):
        await collect(cluster)
        with pytest.raises(InvalidRequest, match="died 2 times"):
            await cluster.client.open(AGAIN)

    _, cluster = run(behave, scenario)
    assert len(cluster.calls) == 2

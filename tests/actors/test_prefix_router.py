"""The router between Serve's replicas and the choice, without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from flare_ray.actors.prefix_router import PATIENCE, PrefixRouter
from flare_ray.contracts.routing import Choice, Route

DEPLOYMENT = DeploymentID("Engine", "flare")
MOST = 100


def replica(name: str, **stats):
    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT), routing_stats=stats, max_ongoing_requests=MOST
    )


def call(*arguments):
    """What Serve knows of a call that waits for a replica."""
    return SimpleNamespace(
        args=[b"request", *arguments], routing_context=SimpleNamespace(should_backoff=False)
    )


@pytest.fixture
def router():
    made = PrefixRouter(
        DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    made.initialize_state(load_factor=1.5, spare_requests=4, known_prefixes=9)
    return made


def chosen(router, replicas, pending) -> set[str]:
    [rank] = asyncio.run(router.choose_replicas(replicas, pending))
    return {found.replica_id.unique_id for found in rank}


def test_routed_request_is_found_again_by_its_key(router):
    route = Route(keys=(b"k" * 16,), home=b"k" * 16)
    both = [replica("a"), replica("b")]
    [home] = chosen(router, both, call(route))
    assert route.choice is Choice.HOME
    [other] = {"a", "b"} - {home}
    router.on_request_routed(call(route), ReplicaID(other, DEPLOYMENT), None)
    again = Route(keys=route.keys, home=route.home)
    assert chosen(router, both, call(again)) == {other}
    assert again.choice is Choice.KNOWN


@pytest.mark.parametrize("stats", [{"ready": False}, {"ready": True, "open": MOST}])
def test_replica_that_is_not_ready_or_full_is_passed_over(router, stats):
    for key in (b"1" * 16, b"2" * 16, b"3" * 16, b"4" * 16):
        route = Route(keys=(key,), home=key)
        assert chosen(router, [replica("a", **stats), replica("b")], call(route)) == {"b"}


def test_silent_engine_is_proposed_a_few_times_and_then_others_too(router):
    route = Route(keys=(b"k" * 16,), home=b"k" * 16)
    pending, both = call(route), [replica("a"), replica("b")]
    first = chosen(router, both, pending)
    for _ in range(PATIENCE - 1):
        assert chosen(router, both, pending) == first and len(first) == 1
    assert chosen(router, both, pending) == {"a", "b"}
    assert route.choice is Choice.GUARD


def test_call_without_a_route_goes_by_load(router):
    assert chosen(router, [replica("a"), replica("b")], call()) == {"a", "b"}

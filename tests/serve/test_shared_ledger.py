"""The rate limits' books are one for all HTTP replicas, and their loss stops nobody."""

import asyncio

import pytest
import ray
from ray.exceptions import RayError

from flare_ray.frontend.access.ledger import Limits
from flare_ray.frontend.ingress import LEDGER_NAMESPACE, SharedLedger

pytestmark = pytest.mark.ray
TWO = Limits(2, None)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


def ask(ledger: SharedLedger, name: str = "a") -> bool:
    return asyncio.run(ledger.take(name, TWO, requests=1, tokens=0)) == 0.0


def test_replicas_share_the_books():
    first, second = SharedLedger("shared"), SharedLedger("shared")
    assert [ask(first), ask(second), ask(first), ask(second)] == [True, True, False, False]
    assert ask(first, "b")


def test_applications_do_not():
    assert [ask(SharedLedger(f"own-{i // 2}")) for i in range(6)] == [True] * 6


def test_lost_books_are_started_anew():
    ledger = SharedLedger("lost")
    assert [ask(ledger) for _ in range(3)] == [True, True, False]
    books = ray.get_actor("flare-ledger:lost", namespace=LEDGER_NAMESPACE)
    ray.kill(books)
    with pytest.raises(RayError):  # a kill takes a moment, in which calls are still served
        while True:
            ray.get(books.take.remote("other", TWO, requests=1, tokens=0))
    assert [ask(ledger) for _ in range(3)] == [True, True, False]

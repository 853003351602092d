"""The controller's one check finds every kind of damage to its books (contract: M1, T6, T7)."""

import pytest

from flare_ray.controller.live import Phase, Unanswered
from flare_ray.errors import ContractViolation
from tests.support.fake_channel import make_manifest
from tests.unit.controller.conftest import Harness


def lively():
    """Requests that run, wait, drain and start from snapshots, with a round in flight."""
    harness = Harness(queue_depth=2, manifest=make_manifest(slots=2, num_pages=12))
    shared = tuple(range(10, 80))
    harness.submit("root", shared, max_tokens=2)
    harness.run_until_idle()
    harness.submit("a", (*shared, 1), max_tokens=60)
    harness.submit("b", (2, 3), max_tokens=60)
    harness.submit("c", (*shared, 4), max_tokens=60)
    harness.submit("d", (5, 6), max_tokens=60)
    harness.run_rounds(4)
    harness.controller.check_integrity()
    return harness


def running(harness, name="a"):
    return harness.controller._requests[name]


def free_page(harness):
    return harness.controller._pool._free[-1]


def claimed_twice(harness):
    snapshot = next(iter(harness.controller._snapshots.index))
    snapshot.row = harness.controller._snapshots.index._free_rows[0]


def shortened(harness):
    snapshot = next(iter(harness.controller._snapshots.index))
    snapshot.pages = snapshot.pages[:-1]


def swapped_slots(harness):
    a, b = running(harness, "a"), running(harness, "b")
    a.slot, b.slot = b.slot, a.slot


def add(thing, name, amount=1):
    setattr(thing, name, getattr(thing, name) + amount)


DAMAGES = {
    "page lost": lambda h: h.controller._pool._free.pop(),
    "page free twice": lambda h: h.controller._pool._free.append(free_page(h)),
    "page free and granted": lambda h: h.controller._pool._free.append(
        h.controller._pool.pages_of(running(h).uid)[-1]
    ),
    "page owned once too often": lambda h: h.controller._pool._owners.__setitem__(free_page(h), 1),
    "reference lost": lambda h: h.controller._pool._holds.__setitem__(
        next(iter(h.controller._snapshots.index)).pages[0], 0
    ),
    "promise miscounted": lambda h: add(h.controller._pool, "_promised"),
    "reservation without an owner": lambda h: h.controller._pool.reserve(999, 1),
    "reservation beyond the worst case": lambda h: setattr(running(h), "limit_pages", 0),
    "reserved differently": lambda h: add(running(h), "reserved_pages"),
    "granted differently": lambda h: add(running(h), "granted_pages"),
    "slot lost": lambda h: add(h.controller._admission.slots, "total"),
    "slots swapped": swapped_slots,
    "stale epoch": lambda h: add(running(h), "epoch"),
    "phase": lambda h: setattr(running(h), "phase", Phase.WAITING),
    "ended among the running": lambda h: setattr(running(h), "phase", Phase.ENDED),
    "forgotten request": lambda h: h.controller._requests.pop("a"),
    "queue out of order": lambda h: h.controller._admission.waiting.reverse(),
    "queued twice": lambda h: h.controller._admission.waiting.append(running(h, "d")),
    "round in flight forgotten": lambda h: h.controller._in_flight.clear(),
    "round in flight imagined": lambda h: running(h).in_flight.append(Unanswered(1, 1)),
    "token forgotten": lambda h: running(h).chain.tokens.pop(),
    "token counted twice": lambda h: add(running(h), "generated_tokens"),
    "consumed beyond its pages": lambda h: add(running(h), "consumed_tokens", 640),
    "row lost": lambda h: h.controller._snapshots.index._free_rows.pop(),
    "row of two snapshots": claimed_twice,
    "snapshot without a page": shortened,
    "pin of nobody": lambda h: add(next(iter(h.controller._snapshots.index)), "pins"),
    "awaited by nobody": lambda h: add(next(iter(h.controller._snapshots.index)), "awaited"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_integrity_check_finds(damage):
    harness = lively()
    DAMAGES[damage](harness)
    with pytest.raises(ContractViolation):
        harness.controller.check_integrity()
    # Not to be found again after the test.
    harness.controller._fatal = ContractViolation("damaged on purpose")


def test_damage_stops_an_idle_engine_in_debug_mode():
    harness = Harness(manifest=make_manifest())
    harness.submit("r", (1, 2), max_tokens=5)
    harness.controller._snapshots.index._free_rows.pop()
    with pytest.raises(AssertionError, match="rows"):
        harness.run_until_idle()


def test_lively_state_has_all_kinds_of_books():
    harness = lively()
    phases = {live.phase for live in harness.controller._requests.values()}
    assert {Phase.DECODE, Phase.WAITING} <= phases
    assert harness.controller._in_flight
    assert len(harness.controller._snapshots.index) >= 2

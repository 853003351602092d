"""The notice that closes an application, and what its HTTP replicas say of their requests."""

import pytest

from flare_ray.actors.draining import SETTLED_LOOKS, Drain, OpenRequests, Stage

pytestmark = pytest.mark.ray


@pytest.fixture
def drain(cluster):
    notice = Drain("draining: test")
    yield notice
    notice.clear()


def test_notice_refuses_then_ends_all_until_it_is_cleared_or_its_time_is_up(drain):
    assert drain.stage() == Stage.OPEN
    drain.ask(60.0, 60.0)
    assert drain.stage() == Drain("draining: test").stage() == Stage.REFUSE_NEW
    assert Drain("another").stage() == Stage.OPEN
    drain.clear()
    assert drain.stage() == Stage.OPEN
    drain.ask(0.0, 60.0)
    assert drain.stage() == Stage.END_ALL
    drain.ask(-2.0, 1.0)
    assert drain.stage() == Stage.OPEN


def test_application_has_drained_once_every_replica_has_settled_with_nothing_open(drain):
    drain.ask(60.0, 60.0)
    assert not drain.drained(1) and drain.drained(0)
    drain.report("one", OpenRequests(0, SETTLED_LOOKS))
    assert drain.drained(1) and not drain.drained(2)
    drain.report("two", OpenRequests(0, SETTLED_LOOKS - 1))
    assert not drain.drained(2)
    drain.report("two", OpenRequests(3, SETTLED_LOOKS))
    assert not drain.drained(2)
    drain.report("two", OpenRequests(0, SETTLED_LOOKS + 4))
    assert drain.drained(2)


def test_new_notice_forgets_the_reports_of_the_last(drain):
    drain.ask(60.0, 60.0)
    drain.report("gone", OpenRequests(5, 9))
    drain.ask(60.0, 60.0)
    assert drain.reports() == []

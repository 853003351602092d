"""Requests that end otherwise than well: refusals, cancellation, deadlines, failures."""

import itertools

import pytest

from flare_ray.contracts.messages import Failed, Finished
from flare_ray.contracts.record import Status
from flare_ray.controller.drain import DrainRate
from flare_ray.controller.verification.adaptive import AdaptivePolicy
from flare_ray.errors import InvalidRequest, RankFailure
from tests.support.fake_channel import (
    VirtualClock,
    accepts_up_to,
    hashed_accepts,
    listed_script,
    make_manifest,
)
from tests.unit.controller.conftest import first_item

EOS = 0

# Cancellation, deadlines, overload.


def test_cancel_while_queued_frees_the_place(make_harness):
    harness = make_harness()
    for number in range(5):
        harness.submit(f"r{number}", (number,), max_tokens=20)
    harness.step()
    harness.controller.cancel("r4")
    harness.run_until_idle()
    end = harness.end("r4")
    assert (end.code, end.emitted) == ("cancelled", False)
    assert harness.tokens("r4") == []
    harness.assert_all_free()


def test_probe_14_cancel_during_chunked_prefill_frees_pages_at_the_next_boundary(make_harness):
    harness = make_harness()
    harness.submit("r", tuple(range(250)) * 3, max_tokens=20)
    harness.run_rounds(3)
    harness.controller.cancel("r")
    harness.step(1 + harness.config.queue_depth)
    assert harness.end("r").code == "cancelled"
    harness.assert_all_free()


def test_cancel_during_decode_frees_at_the_next_boundary_and_nothing_follows(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=500)
    harness.run_rounds(10)
    harness.controller.cancel("r")
    harness.step(1 + harness.config.queue_depth)
    end = harness.end("r")
    assert (end.code, end.emitted) == ("cancelled", True)
    harness.assert_all_free()
    assert not harness.controller.stats().pending_work


def test_cancel_is_idempotent_and_ignores_unknown_ids(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=50)
    harness.run_rounds(2)
    for name in ("r", "r", "nobody"):
        harness.controller.cancel(name)
    harness.run_until_idle()
    assert harness.end("r").code == "cancelled"


def test_resources_of_a_cancelled_request_are_not_reused_under_a_queued_round(make_harness):
    """The fake channel refuses the reuse of slots and pages under a queued round."""
    harness = make_harness(manifest=make_manifest(slots=1))
    for number in range(20):
        harness.submit(f"r{number}", (number, 9), max_tokens=40)
        harness.step(3)
        harness.controller.cancel(f"r{number}")
    harness.run_until_idle()
    harness.assert_all_free()


def test_deadline_ends_a_running_and_a_waiting_request(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1))
    harness.submit("running", (1,), max_tokens=1000, deadline_s=0.2)
    harness.submit("waiting", (2,), max_tokens=5, deadline_s=0.1)
    harness.submit("patient", (3,), max_tokens=5, deadline_s=60.0)
    harness.run_until_idle()
    assert (harness.end("running").code, harness.end("running").emitted) == ("deadline", True)
    assert (harness.end("waiting").code, harness.end("waiting").status) == ("deadline", 504)
    assert harness.end("patient").reason == "length"
    harness.assert_all_free()


def test_queue_beyond_its_bound_is_refused_with_retry_after(make_harness):
    harness = make_harness(admission={"max_waiting": 2, "retry_after_s": 3.0})
    for number in range(8):
        harness.submit(f"r{number}", (number,), max_tokens=5)
    harness.step()
    refused = [n for n in range(8) if isinstance(first_item(harness, f"r{n}"), Failed)]
    assert refused == [6, 7]
    failure = first_item(harness, "r7")
    assert (failure.code, failure.status, failure.retry_after_s) == ("overloaded", 429, 3.0)
    harness.run_until_idle()
    assert harness.tokens("r5") == harness.expected((5,), 5)


def test_queue_is_bounded_in_tokens_too(make_harness):
    """Six tokens a request: four requests run, two may wait."""
    harness = make_harness(admission={"max_waiting_tokens": 12})
    for number in range(8):
        harness.submit(f"r{number}", (number,), max_tokens=5)
    harness.step()
    refused = [n for n in range(8) if isinstance(first_item(harness, f"r{n}"), Failed)]
    assert refused == [6, 7]
    assert "at most 12 tokens" in first_item(harness, "r7").message
    harness.run_until_idle()
    harness.assert_all_free()


def test_request_larger_than_the_token_bound_waits_alone(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1), admission={"max_waiting_tokens": 2})
    harness.submit("running", (1,), max_tokens=5)
    harness.step()
    harness.submit("alone", (2,), max_tokens=5)
    harness.submit("second", (3,), max_tokens=5)
    harness.run_until_idle()
    assert harness.tokens("alone") == harness.expected((2,), 5)
    assert harness.end("second").code == "overloaded"


def test_retry_after_is_the_time_until_the_queue_has_a_place(make_harness):
    """One slot, equal requests, the queue kept full: each refused client is told its own turn."""
    harness = make_harness(
        manifest=make_manifest(slots=1),
        accepts=hashed_accepts(0.0),
        admission={"max_waiting": 3, "retry_after_s": 0.001},
    )
    admission, names = harness.controller._admission, map(str, itertools.count())

    def fill_and_wait_for_a_place():
        while len(admission.waiting) < 3:
            harness.submit(next(names), max_tokens=20)
            harness.step()
        began = harness.clock()
        while len(admission.waiting) == 3:
            harness.step()
        return (harness.clock() - began) / 1e9

    waits = [fill_and_wait_for_a_place() for _ in range(10)]
    harness.submit(next(names), max_tokens=20)
    told = []
    for number in range(3):
        harness.submit(f"refused{number}", max_tokens=20)
        harness.step()
        told.append(harness.end(f"refused{number}").retry_after_s)
    usual_s = sum(waits[-5:]) / 5
    assert told == pytest.approx([usual_s, 2 * usual_s, 3 * usual_s], rel=0.3)
    harness.run_until_idle()


def test_queue_that_stands_still_promises_nothing_soon():
    clock = VirtualClock()
    drain = DrainRate(clock, least_s=1.0, most_s=60.0)
    drain.filled()
    assert drain.refuse(1, 0) == 1.0
    clock.advance(20.0)
    assert drain.refuse(1, 0) == pytest.approx(20.0)
    clock.advance(1000.0)
    assert drain.refuse(1, 0) == 60.0


def test_tokens_over_the_bound_are_waited_for_at_the_rate_of_tokens():
    clock = VirtualClock()
    drain = DrainRate(clock, least_s=0.5, most_s=60.0)
    drain.filled()
    for _ in range(4):
        clock.advance(1.0)
        drain.left(100)
    assert drain.refuse(0, 500) == pytest.approx(5.0)


def test_without_a_queue_requests_run_while_slots_last(make_harness):
    harness = make_harness(admission={"max_waiting": 0})
    for number in range(5):
        harness.submit(f"r{number}", (number,), max_tokens=5)
    harness.run_until_idle()
    assert isinstance(first_item(harness, "r4"), Failed)
    assert harness.tokens("r3") == harness.expected((3,), 5)


def test_lower_priority_value_runs_earlier(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1))
    harness.submit("running", (1,), max_tokens=5)
    harness.step()
    harness.submit("late", (2,), max_tokens=5, priority=1)
    harness.submit("early", (3,), max_tokens=5, priority=-1)
    harness.run_until_idle()
    order = [
        item.request_id
        for _, items in harness.output.batches
        for item in items
        if isinstance(item, Finished)
    ]
    assert order == ["running", "early", "late"]


def test_probe_13_duplicate_live_id_is_refused_and_the_first_is_unharmed(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=10)
    with pytest.raises(InvalidRequest) as refusal:
        harness.submit("r", max_tokens=10)
    assert refusal.value.status == 409
    harness.run_until_idle()
    assert harness.tokens("r") == harness.expected((1, 2, 3), 10)
    harness.submit("r", max_tokens=10)
    harness.run_until_idle()
    assert len(harness.tokens("r")) == 20


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": (1,) * 1024, "max_tokens": 1}, "prompt", ("1024", "1023")),
        ({"prompt": (1,) * 1000, "max_tokens": 25}, "max_tokens", ("1000", "25", "1024")),
        ({"prompt": ()}, "prompt", ("no tokens",)),
        ({"max_tokens": 0}, "max_tokens", ("0",)),
        ({"prompt": (256,)}, "prompt", ("0..255",)),
        ({"stop": (b"",)}, "stop", ("empty",)),
    ],
)
def test_impossible_request_is_refused_with_its_numbers(make_harness, fields, param, words):
    harness = make_harness()
    harness.submit("r", **fields)
    harness.run_until_idle()
    failure = harness.end("r")
    assert (failure.status, failure.param) == (400, param)
    for word in words:
        assert word in failure.message
    assert not harness.channel.plans


# Failure.


def test_rank_failure_ends_every_live_request_once_and_later_submits_are_refused(make_harness):
    harness = make_harness(manifest=make_manifest(slots=2))
    harness.channel.fail_at(6, rank=3, cause="connection closed")
    for number in range(5):
        harness.submit(f"r{number}", (number,), max_tokens=200)
    harness.step(30)
    for number in range(5):
        failure = harness.end(f"r{number}")
        assert failure.code == "rank_failure"
        for word in ("rank 3", "round 6", "connection closed"):
            assert word in failure.message
        assert failure.emitted == bool(harness.tokens(f"r{number}"))
    assert harness.end("r0").emitted and not harness.end("r4").emitted
    with pytest.raises(RankFailure):
        harness.submit("late")
    assert "rank 3" in harness.controller.stats().fatal
    assert not harness.controller.stats().pending_work
    assert harness.controller.step(0.0) is False


def test_rank_that_dies_while_idle_is_noticed_before_the_next_request(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=4)
    harness.run_until_idle()
    harness.channel.kill_rank(1)
    harness.step()
    assert "rank 1" in harness.controller.stats().fatal
    assert harness.output.batches[-1][1][-1] is harness.end("r"), "nobody is left to be told"
    with pytest.raises(RankFailure):
        harness.submit("late")


def test_contract_breach_stops_the_engine_by_name(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=100)
    harness.run_rounds(3)
    harness.channel._slots[0].init = None
    harness.step(5)
    assert harness.end("r").code == "internal_error"
    assert harness.controller.stats().fatal


def test_nonfinite_logits_end_one_request_and_spare_the_others(make_harness):
    harness = make_harness()
    harness.submit("bad", (1,), max_tokens=50)
    harness.submit("good", (2,), max_tokens=50)
    harness.channel.poison(1, 9)
    harness.channel.accepts = accepts_up_to(0)
    harness.run_until_idle()
    failure = harness.end("bad")
    assert (failure.code, failure.status) == ("nonfinite_logits", 500)
    assert harness.tokens("bad") == harness.expected((1,), 9)
    assert harness.tokens("good") == harness.expected((2,), 50)
    harness.assert_all_free()


def test_round_behind_everyones_last_one_is_not_priced(make_harness, monkeypatch):
    prompt = (9, 9)
    harness = make_harness(
        manifest=make_manifest(eos_ids=(EOS,)), script=listed_script({prompt: [5, 6, 7, EOS]})
    )
    answered, priced = [], []
    receive, observe = harness.channel.receive, AdaptivePolicy.observe

    def noted(timeout_s):
        result = receive(timeout_s)
        if result is not None:
            answered.append(any(lane.status & Status.ACTIVE for lane in result.lanes))
        return result

    monkeypatch.setattr(harness.channel, "receive", noted)
    monkeypatch.setattr(
        AdaptivePolicy, "observe", lambda *a: priced.append(a[1].lanes) or observe(*a)
    )
    harness.submit("r", prompt, max_tokens=40)
    harness.run_until_idle()
    assert answered.count(False) == harness.config.queue_depth - 1
    assert priced
    assert all(any(lane.status & Status.ACTIVE for lane in lanes) for lanes in priced)

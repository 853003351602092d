"""Requests that outgrow the pool: who gives way, what is kept, and that all of them end
(contract: C1, M7).

The fake ranks refuse a page that is touched before its grant or reused under a queued round, a save
of what is not there, and a resumed request whose history, counts or pending token are not its own.
"""

import random

import msgspec
import pytest

from flare_ray.contracts.messages import Failed, Finished
from flare_ray.contracts.record import Flag
from flare_ray.controller.admission import GROWTH_PAGES
from flare_ray.controller.live import Phase
from flare_ray.controller.meters import SAMPLE_NS
from flare_ray.controller.paging.pool import pages_for
from tests.support.fake_channel import accepts_up_to, hashed_accepts, make_manifest
from tests.unit.controller.conftest import GREEDY

PENALISED = msgspec.structs.replace(
    GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, bad_words=((4, 5),)
)


def prompt_of(length, seed=0):
    return tuple(10 + (7 * i * i + i + seed) % 240 for i in range(length))


def tight(pages, *, slots=4, context_tokens=448, rows=16):
    """`pages` pages of the pool for all slots."""
    manifest = make_manifest(
        slots=slots, context_tokens=context_tokens, num_pages=pages + 1, prefill_tokens=128
    )
    return msgspec.structs.replace(manifest, snapshot_rows=rows)


def metric(harness, name, *labels):
    harness.clock.advance(SAMPLE_NS / 1e9)
    harness.step(3, timeout_s=0.0)
    samples = harness.recorder.snapshot().samples
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and set(labels) <= set(sample.labels)
    )


def live_of(harness, name):
    harness.controller._receive()
    return harness.controller._requests[name]


def run_until(harness, condition):
    for _ in range(20_000):
        if condition():
            return
        harness.step()
        harness.controller.check_integrity()
    raise AssertionError("it never came to that")


def finish(harness, requests):
    """Run to the end; every request has the text that it gets alone."""
    harness.run_until_idle()
    for name, (prompt, budget) in requests.items():
        assert isinstance(harness.end(name), Finished), harness.end(name)
        assert harness.tokens(name) == harness.expected(prompt, budget), name
    harness.assert_all_free()


@pytest.mark.parametrize("rows", [0, 1, 16])
@pytest.mark.parametrize("accepted", [0, 5])
def test_eight_requests_through_a_pool_for_three_all_finish(make_harness, rows, accepted):
    harness = make_harness(
        manifest=tight(3 * 7, slots=8, rows=rows), accepts=accepts_up_to(accepted)
    )
    requests = {f"r{n}": (prompt_of(60 + n, n), 380) for n in range(8)}
    for number, (name, (prompt, budget)) in enumerate(requests.items()):
        sampling = PENALISED if number % 2 else GREEDY
        harness.submit(name, prompt, max_tokens=budget, sampling=sampling)
    finish(harness, requests)
    assert metric(harness, "flare_preemptions") > 0
    assert harness.channel.resumes > 0
    assert metric(harness, "flare_num_requests_preempted") == 0


def test_short_outputs_are_reserved_in_full_and_never_preempted(make_harness):
    harness = make_harness(manifest=tight(7))
    requests = {f"r{n}": (prompt_of(64, n), GROWTH_PAGES * 64 - 16) for n in range(6)}
    for name, (prompt, budget) in requests.items():
        harness.submit(name, prompt, max_tokens=budget)
    finish(harness, requests)
    assert metric(harness, "flare_preemptions") == 0


def test_without_preemption_nobody_is_interrupted(make_harness):
    harness = make_harness(manifest=tight(7), admission={"preemption": False})
    requests = {f"r{n}": (prompt_of(64, n), 300) for n in range(4)}
    for name, (prompt, budget) in requests.items():
        harness.submit(name, prompt, max_tokens=budget)
    finish(harness, requests)
    assert metric(harness, "flare_preemptions") == 0
    assert metric(harness, "flare_preemption_recomputed_tokens") == 0


def test_lowest_priority_gives_way_first_and_the_youngest_of_equals(make_harness):
    harness = make_harness(manifest=tight(12, slots=4))
    priorities = {"a": 1, "b": 0, "c": 1, "d": 0}
    for number, (name, priority) in enumerate(priorities.items()):
        harness.submit(name, prompt_of(60, number), max_tokens=380, priority=priority)
    order = []

    def noted():
        for name in list(harness.controller._requests):
            if live_of(harness, name).preemptions and name not in order:
                order.append(name)
        return len(order) == 3

    run_until(harness, noted)
    assert order == ["c", "a", "d"]
    finish(harness, {name: (prompt_of(60, n), 380) for n, name in enumerate("abcd")})


def test_preempted_request_comes_back_before_newer_ones_of_its_priority(make_harness):
    harness = make_harness(manifest=tight(9, slots=2))
    harness.submit("old", prompt_of(60, 1), max_tokens=380)
    harness.submit("young", prompt_of(60, 2), max_tokens=380)
    run_until(harness, lambda: live_of(harness, "young").preemptions == 1)
    harness.submit("newer", prompt_of(5, 3), max_tokens=5)
    harness.submit("urgent", prompt_of(5, 4), max_tokens=5, priority=-1)
    finish(
        harness,
        {
            "old": (prompt_of(60, 1), 380),
            "young": (prompt_of(60, 2), 380),
            "newer": (prompt_of(5, 3), 5),
            "urgent": (prompt_of(5, 4), 5),
        },
    )
    ends = [
        item.request_id
        for _, items in harness.output.batches
        for item in items
        if isinstance(item, Finished)
    ]
    assert ends.index("urgent") < ends.index("young")
    first_of = {}
    for plan in harness.channel.plans:
        for init in plan.inits:
            first_of.setdefault(init.uid, []).append(plan.round_id)
    # uid 2 is "young": its second hand-over comes before that of "newer", uid 3
    assert first_of[2][1] < first_of[3][0]


def test_state_is_kept_where_the_pages_given_up_besides_it_are_enough(make_harness):
    """The open page behind the last boundary satisfies the one who is short."""
    harness = make_harness(
        manifest=tight(10, slots=2),
        accepts=accepts_up_to(0),
        speculation={"policy": "fixed", "fixed_width": 1},
    )
    requests = {"old": (prompt_of(120, 1), 300), "young": (prompt_of(90, 2), 300)}
    for name, (prompt, budget) in requests.items():
        harness.submit(name, prompt, max_tokens=budget)
    run_until(harness, lambda: live_of(harness, "young").preemptions == 1)
    kept = live_of(harness, "young").kept
    assert kept is not None and (kept.tokens, kept.awaited) == (256, 1)
    assert live_of(harness, "young").prefill_length > 256
    assert metric(harness, "flare_preemptions", "snapshot") == 1
    finish(harness, requests)


def test_state_is_recomputed_where_no_snapshot_is_possible(make_harness):
    harness = make_harness(manifest=tight(9, slots=2, rows=0))
    requests = {"old": (prompt_of(120, 1), 300), "young": (prompt_of(90, 2), 300)}
    for name, (prompt, budget) in requests.items():
        harness.submit(name, prompt, max_tokens=budget)
    run_until(harness, lambda: live_of(harness, "young").preemptions == 1)
    computed = live_of(harness, "young").computed_tokens
    finish(harness, requests)
    assert metric(harness, "flare_preemptions", "recompute") == 1
    assert metric(harness, "flare_preemption_recomputed_tokens") == computed
    assert metric(harness, "flare_prompt_tokens") == 120 + 90


def test_snapshots_go_before_anybody_is_preempted(make_harness):
    harness = make_harness(manifest=tight(12, slots=2))
    for number in range(3):
        harness.submit(f"past{number}", prompt_of(128, 10 + number), max_tokens=3)
        harness.run_until_idle()
    assert harness.controller._pool.cached_pages >= 6
    harness.submit("a", prompt_of(60, 1), max_tokens=300)
    harness.submit("b", prompt_of(60, 2), max_tokens=300)
    finish(harness, {"a": (prompt_of(60, 1), 300), "b": (prompt_of(60, 2), 300)})
    assert metric(harness, "flare_preemptions") == 0


@pytest.mark.parametrize("moment", ["draining", "waiting"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_end_of_a_preempted_request_frees_everything(queue_depth, make_harness, moment, how):
    harness = make_harness(manifest=tight(9, slots=2))
    harness.submit("old", prompt_of(120, 1), max_tokens=300)
    harness.submit("young", prompt_of(90, 2), max_tokens=300, deadline_s=1e6)
    live = live_of(harness, "young")
    if moment == "draining":
        run_until(harness, lambda: live.generated_tokens > 9)
        harness.controller._admission.preempt(live)
        # with one round in flight none is left between two steps: nothing has to drain
        assert live.phase is (Phase.WAITING, Phase.PREEMPTED)[queue_depth - 1]
    else:
        run_until(harness, lambda: live.preemptions == 1 and live.phase is Phase.WAITING)
    if how == "cancel":
        harness.controller.cancel("young")
    else:
        harness.clock.advance(2e6)
    harness.run_until_idle()
    assert isinstance(harness.end("young"), Failed)
    assert harness.tokens("old") == harness.expected(prompt_of(120, 1), 300)
    harness.assert_all_free()


def test_admission_waits_while_somebody_who_runs_is_short(make_harness):
    """The pages of a preempted request go to the one it gave way to, not to the queue's head, which
    may be itself."""
    harness = make_harness(manifest=tight(9, slots=4))
    for number in range(4):
        harness.submit(f"r{number}", prompt_of(60, number), max_tokens=380)
    finish(harness, {f"r{n}": (prompt_of(60, n), 380) for n in range(4)})
    assert metric(harness, "flare_preemptions") <= 12


@pytest.mark.parametrize("width", [1, 3, 6])
def test_rounds_of_a_resumed_request_start_where_they_would_have_started(make_harness, width):
    """A sampled text depends on where rounds start (draws are keyed by consumed tokens) and how
    many drafts they offer: both are those of the request alone."""

    def rounds(name, pages):
        harness = make_harness(
            manifest=tight(pages, slots=3),
            accepts=hashed_accepts(0.5),
            speculation={"policy": "fixed", "fixed_width": width},
        )
        records = {}
        receive = harness.channel.receive

        def noting(timeout_s):
            result = receive(timeout_s)
            for lane in result.lanes if result else ():
                if lane.status and not lane.flags & Flag.PREFILL:
                    key = lane.consumed - lane.emitted
                    records.setdefault(lane.uid, {})[key] = (lane.offered, lane.tokens)
            return result

        harness.channel.receive = noting
        names = [name] if pages > 20 else ["a", "b", "c"]
        for other in names:
            harness.submit(other, prompt_of(70, ord(other)), max_tokens=370)
        uids = {other: live_of(harness, other).uid for other in names}
        harness.run_until_idle()
        assert pages > 20 or harness.channel.resumes > 0
        return records[uids[name]]

    for name in "abc":
        assert rounds(name, 9) == rounds(name, 40)


def preemption_bound(harness, live):
    """Pages that those in front of a request can come to need."""
    limits = harness.controller._admission.limits
    return sum(
        limits.worst_case_pages(other.request)
        for other in harness.seen.values()
        if other.order < live.order
    )


def play_tight_load(harness, rng, requests):
    """Random arrivals, branches, cancels and deadlines; integrity after every step."""
    harness.seen = {}
    roots = [prompt_of(rng.choice([1, 63, 64, 65, 127, 128, 129, 190]), s) for s in range(3)]
    for number in range(requests):
        root = rng.choice(roots)
        prompt = (*root, *prompt_of(rng.choice([0, 0, 1, 5, 70]), rng.randint(0, 3)))
        name, budget = f"r{number}", min(rng.choice([1, 5, 130, 300, 440]), 448 - len(prompt))
        harness.jobs[name] = (prompt, budget)
        harness.submit(
            name,
            prompt,
            max_tokens=budget,
            priority=rng.choice([0, 0, 0, 1, -1]),
            sampling=rng.choice([GREEDY, PENALISED]),
            deadline_s=rng.uniform(0.05, 3.0) if rng.random() < 0.1 else 0.0,
        )
        for _ in range(rng.choice([0, 0, 1, 3, 10, 60])):
            harness.step()
            harness.seen.update(harness.controller._requests)
            harness.controller.check_integrity()
        if rng.random() < 0.15:
            harness.controller.cancel(rng.choice(list(harness.jobs)))
    for _ in range(20_000):
        if not harness.controller.stats().pending_work:
            break
        harness.step()
        harness.seen.update(harness.controller._requests)
    harness.run_until_idle()


def check_tight_load(queue_depth, make_harness, seed, requests):
    rng = random.Random(seed)
    harness = make_harness(
        manifest=tight(
            rng.choice([7, 9, 12, 20]), slots=rng.choice([2, 3, 8]), rows=rng.choice([0, 2, 20])
        ),
        accepts=hashed_accepts(rng.choice([0.0, 0.5, 0.9, 1.0])),
        admission={"max_waiting": 256},
    )
    harness.jobs = {}
    play_tight_load(harness, rng, requests)
    for name, (prompt, budget) in harness.jobs.items():
        end = harness.end(name)
        text = harness.tokens(name)
        assert text == harness.expected(prompt, budget)[: len(text)], name
        assert isinstance(end, Failed) or len(text) == budget
    for live in harness.seen.values():
        assert live.preemptions <= preemption_bound(harness, live)
    harness.assert_all_free()
    return int(metric(harness, "flare_preemptions"))


@pytest.mark.parametrize("run", range(6))
def test_random_tight_loads_end_with_every_text_as_if_alone(
    queue_depth, make_harness, run, random_seed
):
    check_tight_load(queue_depth, make_harness, random_seed, 40)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(25))
def test_ten_thousand_random_arrivals_preempt_and_end_as_if_alone(
    queue_depth, make_harness, part, random_seed
):
    """Ten thousand over all parts."""
    preempted = 0
    for run in range(5):
        preempted += check_tight_load(queue_depth, make_harness, random_seed + run, 80)
    assert preempted > 0


def test_resumed_request_reports_the_prefix_it_first_started_from(make_harness):
    harness = make_harness(manifest=tight(9, slots=2))
    harness.submit("root", prompt_of(64, 2), max_tokens=1)
    harness.run_until_idle()
    requests = {"old": (prompt_of(120, 1), 300), "young": (prompt_of(90, 2), 300)}
    for name, (prompt, budget) in requests.items():
        harness.submit(name, prompt, max_tokens=budget)
    finish(harness, requests)
    assert harness.channel.resumes > 0
    assert harness.end("young").cached_tokens == 64
    assert metric(harness, "flare_prefix_cache_queries") == 64 + 120 + 90
    assert metric(harness, "flare_prefix_cache_hits") == 64


def test_pool_is_never_promised_beyond_its_pages(make_harness):
    harness = make_harness(manifest=tight(9, slots=4), accepts=accepts_up_to(5))
    for number in range(4):
        harness.submit(f"r{number}", prompt_of(60, number), max_tokens=380)
    least = []

    def noted():
        pool = harness.controller._pool
        least.append(pool.free_pages)
        for live in harness.controller._admission.running.values():
            assert live.reserved_pages <= live.limit_pages
            assert live.consumed_bound <= live.limit_pages * 64
            assert pages_for(live.consumed_bound) <= max(live.reserved_pages, 1)
        return not harness.controller.stats().pending_work

    run_until(harness, noted)
    assert min(least) == 0

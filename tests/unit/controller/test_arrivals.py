"""Random arrival patterns: nobody waits beyond the stated bound, priorities and shares hold, and
whatever ends a request frees everything (contract: C1).

The bounds are those that `admission`, `cohort` and `shares` state, counted in programs.
"""

import itertools
import random
from collections import defaultdict

import pytest

from flare_ray.contracts.messages import Failed
from flare_ray.controller.cohort import residence_bound
from tests.support.fake_channel import hashed_accepts, make_manifest
from tests.unit.controller.conftest import Harness

PATTERNS = 25
ALL_PATTERNS = 5_000
"""At each of the two queue depths."""
CONTEXT_TOKENS = 320
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}
SPREAD_ROUNDS = 1


class Watch:
    """What happens to requests, seen between the controller's steps.

    Attributes:
        arrived / admitted / ended: by uid, programs submitted until then.
        order: (priority, tenant) -> uids in order of first admission.
        ahead: by uid, requests that ran at some time while it waited.
    """

    def __init__(self, harness):
        self.harness = harness
        self.admission = harness.controller._admission
        self.arrived, self.admitted, self.ended = {}, {}, {}
        self.order = defaultdict(list)
        self.ahead = defaultdict(set)
        self.requests = {}
        self.short = False
        self._admit = self.admission.admit
        self.admission.admit = self.admit

    def admit(self):
        """The real one, held to the order that it states."""
        self._see_waiting()
        admitted = self._admit()
        for live in admitted:
            passed = [
                other
                for other in self.admission.waiting
                if not self.admission.snapshots.is_restoring(other)
            ]
            assert all(other.request.priority >= live.request.priority for other in passed)
            if live.uid not in self.admitted:
                self.admitted[live.uid] = self.programs
                self.order[live.request.priority, live.request.tenant].append(live.uid)
        self._see_waiting()
        if not self.admission.short_pages:
            self._check_work_is_conserved()
        return admitted

    @property
    def programs(self):
        return len(self.harness.channel.plans)

    def after_step(self):
        running = self.admission.running
        self.short |= self.admission.short_pages > 0
        for uid in self.admitted.keys() - self.ended.keys():
            live = self.requests[uid]
            if uid not in running and live.phase.name == "ENDED":
                self.ended[uid] = self.programs

    def _see_waiting(self):
        for live in self.admission.waiting:
            self.requests[live.uid] = live
            self.arrived.setdefault(live.uid, self.programs)
            self.ahead[live.uid].update(self.admission.running)

    def _check_work_is_conserved(self):
        """While somebody waits as many run as are certain to fit.

        Who was let in with a cached prefix keeps one page more pinned until its first program.
        """
        if any(live.snapshot is not None for live in self.admission.running.values()):
            return
        if any(not self.admission.snapshots.is_restoring(o) for o in self.admission.waiting):
            assert len(self.admission.holders) >= self.certain

    @property
    def certain(self):
        """Requests that certainly run while another one waits."""
        most = max(live.limit_pages for live in self.requests.values())
        pages = self.admission.pool.total_pages
        return min(self.admission.slots.total, max(pages // most, 1))


def random_requests(rng):
    """(arrival seconds, name, prompt, budget, fields, seconds until it is cancelled)."""
    shape = rng.choice(["burst", "poisson", "waves"])
    now = 0.0
    for number in range(rng.randint(4, 12)):
        if shape == "poisson":
            now += rng.expovariate(20.0)
        elif shape == "waves" and number % 4 == 0:
            now += rng.uniform(0.0, 0.6)
        tenant = rng.choice("abc")
        fields = {
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "tenant": tenant,
            "weight": WEIGHTS[tenant],
        }
        if rng.random() < 0.15:
            fields["deadline_s"] = rng.uniform(0.01, 1.0)
        prompt = tuple(rng.choices(range(256), k=rng.choice([1, 3, 40, 64, 65, 130])))
        budget = rng.choice([1, 2, 9, 40, 90])
        cancelled = rng.uniform(0.0, 0.5) if rng.random() < 0.2 else None
        yield now, f"r{number}", prompt, budget, fields, cancelled


def random_harness(rng, queue_depth):
    slots = rng.choice([1, 2, 4])
    harness = Harness(
        queue_depth=queue_depth,
        manifest=make_manifest(
            slots=slots,
            draft_tokens=rng.choice([0, 2, 5]),
            context_tokens=CONTEXT_TOKENS,
            # Five pages are one context; some pools hold fewer requests than there are slots.
            num_pages=rng.choice([0, 0, 7, 12]),
            prefill_tokens=rng.choice([16, 64]),
            eos_ids=(11,),
        ),
        accepts=hashed_accepts(rng.choice([0.0, 0.5, 1.0])),
        admission={"max_waiting": rng.choice([2, 64]), "preemption": rng.random() < 0.6},
        prefix_cache={"enabled": rng.random() < 0.5},
    )
    harness.channel.latency_s = lambda plan: 0.002 * plan.shape.verify_width * rng.random()
    return harness


def play(harness, watch, requests):
    """Submit and cancel in virtual time until nobody is left."""
    events = []
    for at_s, name, prompt, budget, fields, cancelled in requests:
        events.append((at_s, 0, name, (prompt, budget, fields)))
        if cancelled is not None:
            events.append((at_s + cancelled, 1, name, None))
    for at_s, _, name, job in sorted(events, key=lambda event: event[:3]):
        at_ns = round(at_s * 1e9)
        while harness.clock() < at_ns:
            harness.step(timeout_s=(at_ns - harness.clock()) / 1e9)
            watch.after_step()
        if job is None:
            harness.controller.cancel(name)
        else:
            prompt, budget, fields = job
            harness.submit(name, prompt, budget, **fields)
    while harness.controller.stats().pending_work:
        assert not harness.controller.stats().fatal
        harness.step()
        watch.after_step()
    harness.run_until_idle()


def check_waits(harness, watch):
    """Wait in the queue and time in a slot, in programs, against what is stated."""
    slots, rows = watch.admission.slots.total, harness.config.prefill_tokens
    least_chunk = min(s.token_capacity for s in harness.manifest.shapes if s.kind == "prefill")
    assert least_chunk <= rows
    interrupted = watch.short or any(watch.admission.preempted.values())

    def bound(uid):
        live = watch.requests[uid]
        tokens = len(live.request.prompt_tokens)
        if interrupted:
            tokens = CONTEXT_TOKENS  # what it had consumed is computed again
        return residence_bound(tokens, live.request.max_tokens, slots=slots, chunk=least_chunk)

    certain = 1 if interrupted else watch.certain
    for uid, at in watch.arrived.items():
        until = watch.admitted.get(uid)
        if until is not None:
            ahead = sum(bound(other) for other in watch.ahead[uid])
            assert until - at <= ahead / certain + harness.config.queue_depth
        if uid in watch.ended and not interrupted:
            assert watch.ended[uid] - watch.admitted[uid] <= bound(uid)


def check_spread(harness):
    """Of two requests that decode side by side neither takes part in more than one round more."""
    rounds = defaultdict(list)
    for place, plan in enumerate(harness.channel.plans):
        for lane in plan.lanes:
            rounds[lane.slot, lane.epoch].append(place)
    for one, other in itertools.combinations(rounds.values(), 2):
        begin, end = max(one[0], other[0]), min(one[-1], other[-1])
        counts = [sum(begin <= place <= end for place in places) for places in (one, other)]
        assert abs(counts[0] - counts[1]) <= SPREAD_ROUNDS


def play_pattern(rng, queue_depth):
    harness = random_harness(rng, queue_depth)
    watch = Watch(harness)
    jobs = list(random_requests(rng))
    play(harness, watch, jobs)
    for _, name, *_ in jobs:
        end = harness.end(name)
        if isinstance(end, Failed):
            assert end.code in ("cancelled", "deadline", "overloaded")
    harness.assert_all_free()
    for uids in watch.order.values():
        assert uids == sorted(uids), "a tenant's requests of one priority keep their order"
    check_waits(harness, watch)
    if not watch.short:
        check_spread(harness)


def test_random_arrivals_wait_no_longer_than_stated(queue_depth, random_seed):
    for number in range(PATTERNS):
        play_pattern(random.Random(f"{random_seed} {number}"), queue_depth)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_arrival_patterns_keep_every_bound(queue_depth, random_seed):
    for number in range(ALL_PATTERNS):
        play_pattern(random.Random(f"{random_seed} {number}"), queue_depth)

"""Random loads against a brute-force account of what each request must get."""

import random
from dataclasses import dataclass, field

import pytest

from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.plan import RoundPlan
from tests.support.fake_channel import hashed_accepts, make_manifest
from tests.support.stop_reference import Stops, one_shot
from tests.unit.controller.conftest import TOKEN_BYTES, Harness

EOS_IDS = (11, 12)
RUNS = 25
REQUESTS = 30
TURN_BOUND = 3
"""Programs between two turns of a decoding request: its own in flight, a prefill, the next. Who is
short of pages may sit out for longer."""


@dataclass
class Job:
    """One random request and what is done to it."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives_s: float
    cancel_after_s: float | None
    fields: dict = field(default_factory=dict)

    @property
    def stops(self) -> Stops:
        ignore_eos = self.fields.get("ignore_eos", False)
        return Stops(
            max_tokens=self.max_tokens,
            eos=() if ignore_eos else EOS_IDS,
            strings=self.fields.get("stop", ()),
            ids=self.fields.get("stop_token_ids", ()),
            include=self.fields.get("include_stop", False),
        )


def random_job(rng: random.Random, number: int) -> Job:
    fields = {
        "ignore_eos": rng.random() < 0.3,
        "include_stop": rng.random() < 0.5,
        "priority": rng.choice([0, 0, 0, 1]),
        "reply_to": rng.choice(["ingress0", "ingress1"]),
    }
    if rng.random() < 0.4:
        strings = [bytes(rng.choices(range(10, 256), k=rng.choice([1, 2]))) for _ in range(2)]
        fields["stop"] = tuple(strings)
    if rng.random() < 0.2:
        fields["stop_token_ids"] = (rng.randrange(10, 256),)
    if rng.random() < 0.1:
        fields["deadline_s"] = rng.uniform(0.01, 2.0)
    return Job(
        name=f"r{number}",
        prompt=tuple(rng.choices(range(256), k=rng.choice([1, 3, 63, 64, 65, 200]))),
        max_tokens=rng.choice([1, 2, 7, 64, 65, 200]),
        arrives_s=rng.uniform(0, 3.0),
        cancel_after_s=rng.uniform(0, 1.0) if rng.random() < 0.25 else None,
        fields=fields,
    )


def play(harness: Harness, jobs: list[Job]) -> None:
    """Submit and cancel at the jobs' times, in virtual time."""
    events = [(job.arrives_s, "submit", job) for job in jobs]
    events += [
        (job.arrives_s + job.cancel_after_s, "cancel", job)
        for job in jobs
        if job.cancel_after_s is not None
    ]
    for at_s, what, job in sorted(events, key=lambda event: event[0]):
        at_ns = round(at_s * 1e9)
        while harness.clock() < at_ns:
            harness.step(timeout_s=(at_ns - harness.clock()) / 1e9)
            assert not harness.controller.stats().fatal
        if what == "submit":
            harness.submit(job.name, job.prompt, job.max_tokens, **job.fields)
        else:
            harness.controller.cancel(job.name)
    harness.run_until_idle()


def visible_bytes(harness: Harness, name: str) -> bytes:
    text = b""
    for item in harness.output.items(name):
        if isinstance(item, Delta):
            text += b"".join(TOKEN_BYTES[token] for token in item.tokens)
            text = text[: len(text) - item.trim_bytes]
    return text


def check_job(harness: Harness, job: Job) -> str:
    """The job's outcome; asserts that it is what brute force says."""
    tokens = harness.expected(job.prompt, job.max_tokens)
    text, reason, stop_reason, count = one_shot(tokens, TOKEN_BYTES, job.stops)
    end = harness.end(job.name)
    if isinstance(end, Failed):
        assert end.code in ("cancelled", "deadline", "overloaded")
        assert text.startswith(visible_bytes(harness, job.name))
        assert end.emitted == bool(visible_bytes(harness, job.name))
        return end.code
    assert isinstance(end, Finished)
    assert visible_bytes(harness, job.name) == text
    assert (end.reason, end.stop_reason, end.completion_tokens) == (reason, stop_reason, count)
    return "finished"


def longest_gap(plans: list[RoundPlan]) -> int:
    """Most programs between two consecutive rounds of one slot and epoch."""
    last: dict[tuple[int, int], int] = {}
    longest = 0
    for place, plan in enumerate(plans):
        for lane in plan.lanes:
            key = (lane.slot, lane.epoch)
            longest = max(longest, place - last.get(key, place))
            last[key] = place
    return longest


@pytest.mark.parametrize("run", range(RUNS))
def test_random_load_loses_and_doubles_nothing_and_frees_everything(queue_depth, run, random_seed):
    rng = random.Random(random_seed)
    slots = rng.choice([1, 2, 4, 5])
    # A context of 448 tokens is 7 pages: some pools hold fewer requests than there are slots.
    num_pages = rng.choice([0, 8, 15])
    harness = Harness(
        queue_depth=queue_depth,
        manifest=make_manifest(
            slots=slots,
            draft_tokens=rng.choice([0, 1, 5, 7]),
            context_tokens=448,
            num_pages=num_pages,
            prefill_tokens=rng.choice([32, 64, 128]),
            eos_ids=EOS_IDS,
        ),
        accepts=hashed_accepts(rng.choice([0.0, 0.5, 0.9, 1.0])),
        admission={"max_waiting": rng.choice([3, 64])},
    )
    harness.channel.latency_s = lambda plan: 0.003 * plan.shape.verify_width * rng.random()
    jobs = [random_job(rng, number) for number in range(REQUESTS)]
    play(harness, jobs)
    outcomes = [check_job(harness, job) for job in jobs]
    assert "finished" in outcomes
    harness.assert_all_free()
    if queue_depth == 1:
        assert harness.channel.dead_lanes == 0, "with one round in flight no lane can be dead"
    if not num_pages:
        assert longest_gap(harness.channel.plans) <= TURN_BOUND


def test_seeded_load_gives_the_same_plans_twice(queue_depth):
    def plans():
        rng = random.Random(5)
        harness = Harness(queue_depth=queue_depth, manifest=make_manifest(context_tokens=448))
        play(harness, [random_job(rng, number) for number in range(REQUESTS)])
        return harness.channel.plans

    assert plans() == plans()

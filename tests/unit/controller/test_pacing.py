"""The objective slo: widths that keep the inter-token target, and prompts held back for it."""

import itertools

import pytest
from pydantic import ValidationError

from flare_ray.config import SpeculationConfig
from flare_ray.contracts.shapes import speculative_shapes
from flare_ray.controller.pacing import MOST_DEFERRED_ROUNDS, PrefillGate
from flare_ray.controller.verification import AdaptivePolicy, Cohort, CohortLane, CompletedRound
from flare_ray.metrics import names
from tests.support.fake_channel import make_manifest
from tests.support.policy_simulator import lane_record

MS = 1e6
ROUND_S, PROMPT_S = 0.010, 0.040
TARGET_MS = 15.0
"""With rounds of 10 ms and prompts' programs of 40 ms: a program every eight rounds."""
TOLERANCE = 1.1
"""The first program runs before its price is known, and windows end anywhere."""
LONG_PROMPT = tuple(range(200)) * 4
CATALOG = speculative_shapes(2, range(1, 9), 128)[8:]
PRICES_MS = (10.0, 11.0, 12.0, 13.0, 20.0, 30.0, 40.0, 50.0)


# Prompts.


def latency(plan):
    return PROMPT_S if plan.prefill else ROUND_S


def beside_decode(make_harness, speculation):
    """Programs that ran while one request decoded and a long prompt was consumed."""
    harness = make_harness(
        manifest=make_manifest(slots=2, draft_tokens=0),
        speculation=speculation,
        prefix_cache={"enabled": False},
    )
    harness.channel.latency_s = latency
    harness.submit("decodes", (1, 2), max_tokens=900)
    harness.run_rounds(4)
    harness.submit("prompt", LONG_PROMPT, max_tokens=2)
    while not harness.tokens("prompt"):
        harness.step()
    plans = harness.channel.plans
    first = next(i for i, plan in enumerate(plans) if plan.prefill and i)
    last = max(i for i, plan in enumerate(plans) if plan.prefill)
    return harness, plans[first : last + 1]


def ms_per_token(plans):
    rounds = [plan for plan in plans if plan.lanes]
    return 1e3 * sum(map(latency, plans)) / len(rounds)


def test_prompts_beside_rounds_keep_the_target(make_harness):
    slo = {"objective": "slo", "inter_token_slo_ms": TARGET_MS}
    harness, plans = beside_decode(make_harness, slo)
    assert ms_per_token(plans) <= TOLERANCE * TARGET_MS
    deferred = harness.recorder.counter(names.PREFILL_DEFERRED).value
    assert deferred >= sum(bool(plan.prefill) for plan in plans)


def test_without_a_target_prompts_alternate_with_rounds(make_harness):
    """Negative control: the same load takes four times the target."""
    harness, plans = beside_decode(make_harness, {})
    assert ms_per_token(plans) > 3 * TARGET_MS
    assert not harness.recorder.counter(names.PREFILL_DEFERRED).value


def test_target_out_of_reach_holds_prompts_back_for_a_bounded_number_of_rounds(make_harness):
    _, plans = beside_decode(make_harness, {"objective": "slo", "inter_token_slo_ms": 1.0})
    places = [i for i, plan in enumerate(plans) if plan.prefill]
    gaps = [after - before - 1 for before, after in itertools.pairwise(places)]
    assert max(gaps) <= MOST_DEFERRED_ROUNDS + 1
    assert min(gaps[1:]) >= MOST_DEFERRED_ROUNDS


def test_prompts_alone_are_never_held_back(make_harness):
    harness = make_harness(speculation={"objective": "slo", "inter_token_slo_ms": 1.0})
    harness.channel.latency_s = latency
    harness.submit("prompt", LONG_PROMPT, max_tokens=1)
    harness.run_until_idle()
    assert not harness.recorder.counter(names.PREFILL_DEFERRED).value


def test_slack_saves_up_one_program_at_most():
    gate = PrefillGate(15.0)
    gate.prompts_done(40.0)
    for _ in range(100):
        gate.round_done(10.0, emitted=1, lanes=1)
    assert gate.admits()
    assert not gate.admits(), "a quiet stretch pays for one program, not for a burst"


def test_tokens_of_drafts_count_towards_the_target():
    gate = PrefillGate(15.0)
    gate.prompts_done(40.0)
    assert not gate.admits()
    gate.round_done(20.0, emitted=12, lanes=3)
    assert gate.admits(), "four tokens a lane in 20 ms leave 40 ms"


# Widths.


def settled_width(policy, accepted, rounds=200):
    """Width that two lanes end up with, which accept so many drafts each."""
    cohort = Cohort(tuple(CohortLane(uid, 7) for uid in range(1, 1 + len(accepted))))
    widths = []
    for _ in range(rounds):
        shape = policy.choose(cohort, CATALOG)
        drafts = shape.draft_tokens
        widths.append(shape.verify_width)
        records = tuple(
            lane_record(uid, offered=drafts, accepted=min(passed, drafts))
            for uid, passed in enumerate(accepted, start=1)
        )
        price_ns = round(PRICES_MS[shape.verify_width - 1] * MS)
        policy.observe(CompletedRound(shape, records), price_ns)
    last = widths[-rounds // 4 :]
    return max(set(last), key=last.count)


def policy(target_ms=0.0):
    objective = "slo" if target_ms else "throughput"
    return AdaptivePolicy(objective=objective, inter_token_ns=target_ms * MS)


def test_generous_target_changes_no_choice():
    assert settled_width(policy(1000.0), (7, 7)) == settled_width(policy(), (7, 7))


def test_slowest_lane_keeps_the_target():
    """A hopeless lane beside a good one: width one is its fastest, four drafts serve both best."""
    assert settled_width(policy(), (7, 0)) > 2
    assert settled_width(policy(11.5), (7, 0)) == 2
    assert settled_width(policy(12.5), (7, 0)) == 3


def test_target_that_no_width_keeps_leaves_the_slowest_lane_as_fast_as_it_can_be():
    assert settled_width(policy(1.0), (7, 0)) == 1
    assert settled_width(policy(1.0), (3, 3)) == 4


def test_decision_tells_the_time_between_tokens_of_the_slowest_lane():
    chooser = policy(12.0)
    settled_width(chooser, (7, 0))
    decision = chooser.decision()
    assert decision.inter_token_ns[0] == pytest.approx(10 * MS, rel=0.05)
    assert len(decision.inter_token_ns) == len(decision.candidates)


# Settings.


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "slo"},
        {"inter_token_slo_ms": 20.0},
        {"objective": "latency", "inter_token_slo_ms": 20.0},
        {"objective": "slo", "inter_token_slo_ms": 0.0},
        {"objective": "slo", "inter_token_slo_ms": -1.0},
        {"objective": "slo", "inter_token_slo_ms": 20.0, "policy": "fixed"},
    ],
)
def test_nonsensical_targets_are_refused_by_name(settings):
    with pytest.raises(ValidationError, match=r"slo"):
        SpeculationConfig(**settings)

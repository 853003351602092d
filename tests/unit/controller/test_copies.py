"""Rounds that copy from shared history and from the request's own text, over a fake engine
(contract: H1, H2, H3)."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ValidationError

from flare_ray.config import SpeculationConfig
from flare_ray.contracts.messages import Failed
from flare_ray.contracts.record import LaneRecord
from flare_ray.contracts.shapes import speculative_shapes
from flare_ray.controller.history.windows import window_of
from flare_ray.controller.verification import (
    AdaptivePolicy,
    Cohort,
    CohortLane,
    CompletedRound,
    ProposalSource,
)
from flare_ray.controller.verification.log import replay
from flare_ray.metrics import names
from tests.support.fake_channel import accepts_up_to, hashed_accepts, listed_script, make_manifest

TEXT = [50 + 7 * i % 150 for i in range(60)]
FIRST, SECOND = (1, 2, 3), (4, 5, 6)
WIDE = {"policy": "fixed", "fixed_width": 6}
NO_DRAFT = accepts_up_to(0)
"""The drafter is never right: whatever is accepted was copied."""


def copying(make_harness, texts, accepts=NO_DRAFT, **speculation):
    return make_harness(
        manifest=make_manifest(draft_tokens=5, slots=2),
        script=listed_script(texts, then=9),
        accepts=accepts,
        speculation=speculation or {"history_drafts": True, **WIDE},
    )


def answer(harness, name, prompt, **fields):
    fields.setdefault("max_tokens", len(TEXT))
    harness.submit(name, prompt, **fields)
    harness.run_until_idle()
    return harness.end(name)


def copied(harness, series=names.SPEC_COPIED_TOKENS):
    return {
        source.name.lower(): total
        for source in ProposalSource
        if (
            total := sum(
                harness.recorder.counter(series, source.name.lower(), str(depth)).value
                for depth in range(5)
            )
        )
    }


def test_a_request_copies_what_another_one_generated(make_harness):
    harness = copying(make_harness, {FIRST: TEXT, SECOND: TEXT})
    assert answer(harness, "a", FIRST).copies_offered == 0
    end = answer(harness, "b", SECOND)
    assert harness.tokens("a") == harness.tokens("b") == TEXT
    assert end.copies_accepted == end.copies_offered > 40
    assert end.rounds < 20
    assert copied(harness)["history"] > copied(harness).get("history_short", 0) > 0
    assert copied(harness) == copied(harness, names.SPEC_COPIED_ACCEPTED_TOKENS)
    assert end.predicted_offered == 0


def test_tenants_copy_nothing_of_each_other(make_harness):
    harness = copying(make_harness, {FIRST: TEXT, SECOND: TEXT})
    answer(harness, "a", FIRST, cache_salt="one")
    assert answer(harness, "b", SECOND, cache_salt="two").copies_offered == 0
    assert answer(harness, "c", SECOND, cache_salt="one").copies_accepted > 40


def test_prompts_never_reach_the_history(make_harness):
    """Contract H1: a query may use prompt context, the ring holds generated tokens alone."""
    harness = copying(make_harness, {tuple(TEXT): [7, 8] * 10, SECOND: TEXT})
    answer(harness, "a", tuple(TEXT), max_tokens=20)
    ring = harness.controller._intake._copying.ring
    assert len(ring) == 20
    assert answer(harness, "b", SECOND).copies_accepted == 0


def test_the_end_of_a_prompt_is_looked_up_in_the_history(make_harness):
    """The first round copies: eight tokens of context are there before any was generated."""
    prompt = tuple(TEXT[:20])
    harness = copying(make_harness, {FIRST: TEXT, prompt: TEXT[20:]})
    answer(harness, "a", FIRST)
    end = answer(harness, "b", prompt, max_tokens=40)
    assert harness.tokens("b") == TEXT[20:]
    assert end.rounds == 1 + -(-39 // 6)


def test_what_was_generated_behind_a_stop_is_not_copied(make_harness):
    harness = copying(make_harness, {FIRST: TEXT, SECOND: TEXT})
    answer(harness, "a", FIRST, stop_token_ids=(TEXT[30],))
    ring = harness.controller._intake._copying.ring
    assert len(ring) == 31
    assert ring.find("", window_of(TEXT[:31])) is None


def test_a_cancelled_request_leaves_what_it_had_committed(make_harness):
    harness = copying(make_harness, {FIRST: TEXT, SECOND: TEXT})
    harness.submit("a", FIRST, max_tokens=len(TEXT))
    harness.run_rounds(12)
    committed = harness.controller._requests["a"].generated_tokens
    harness.controller.cancel("a")
    harness.run_until_idle()
    assert isinstance(harness.end("a"), Failed)
    assert len(harness.controller._intake._copying.ring) == committed
    assert answer(harness, "b", SECOND).copies_accepted > 0
    harness.assert_all_free()


def test_preempted_requests_write_their_text_once_and_copy_on(make_harness):
    long = [10 + (i * i) % 199 for i in range(300)]
    harness = make_harness(
        manifest=make_manifest(slots=2, context_tokens=512, num_pages=9, draft_tokens=5),
        script=listed_script({FIRST: long, SECOND: long}, then=9),
        accepts=NO_DRAFT,
        speculation={"history_drafts": True, "request_drafts": True},
    )
    for name, prompt in (("a", FIRST), ("b", SECOND)):
        harness.submit(name, prompt, max_tokens=300)
    harness.run_until_idle()
    assert harness.tokens("a") == harness.tokens("b") == long
    assert sum(harness.controller._admission.preempted.values())
    assert len(harness.controller._intake._copying.ring) == 600


def test_a_request_copies_its_own_prompt(make_harness):
    prompt = (*TEXT, 1, 2, *TEXT[:6])
    harness = copying(make_harness, {prompt: TEXT[6:]}, request_drafts=True, **WIDE)
    end = answer(harness, "a", prompt, max_tokens=50)
    assert harness.tokens("a") == TEXT[6:56]
    assert end.copies_accepted == end.copies_offered > 35
    assert set(copied(harness)) <= {"request", "request_short"}
    assert harness.controller._intake._copying.ring is None


@pytest.mark.parametrize("sources", [("history_drafts",), ("history_drafts", "request_drafts")])
def test_adaptive_rounds_copy_once_the_text_has_shown_that_it_pays(make_harness, sources):
    harness = copying(
        make_harness, {FIRST: TEXT * 4, SECOND: TEXT * 4}, **dict.fromkeys(sources, True)
    )
    answer(harness, "a", FIRST, max_tokens=240)
    end = answer(harness, "b", SECOND, max_tokens=240)
    assert harness.tokens("b") == TEXT * 4
    assert end.copies_accepted > 150 and end.rounds < 80


def test_bad_copies_are_judged_by_the_text_and_left_to_the_drafter(make_harness):
    """Four tokens recur, what follows differs each time; the drafter is always right."""
    text = [token for i in range(60) for token in (1, 2, 3, 4, 100 + i, 50 + i % 7)]
    harness = copying(
        make_harness, {FIRST: text, SECOND: text[::-1]}, hashed_accepts(0.97), history_drafts=True
    )
    end = answer(harness, "a", FIRST, max_tokens=360)
    assert end.copies_offered <= 25
    assert end.rounds < 110


def test_copies_alone_leave_width_one_where_there_is_nothing_to_copy(make_harness):
    harness = copying(
        make_harness,
        {FIRST: TEXT, SECOND: TEXT},
        hashed_accepts(1.0),
        history_drafts=True,
        learned_drafts=False,
    )
    end = answer(harness, "a", FIRST)
    assert (end.drafts_offered, end.rounds) == (0, len(TEXT))
    end = answer(harness, "b", SECOND)
    assert end.drafts_offered == end.copies_offered > 30


def test_a_decision_log_with_copies_replays(make_harness, tmp_path):
    log = tmp_path / "decisions.jsonl"
    harness = copying(
        make_harness,
        {FIRST: TEXT * 2, SECOND: TEXT * 2},
        hashed_accepts(0.5),
        history_drafts=True,
        request_drafts=True,
        decision_log=str(log),
    )
    for name, prompt in (("a", FIRST), ("b", SECOND)):
        answer(harness, name, prompt, max_tokens=120)
    harness.controller._policy.close()
    choices, different = replay(log)
    assert choices > 40 and different == 0


def test_copies_that_were_not_offered_teach_their_source_alone():
    policy = AdaptivePolicy()
    lane = CohortLane(1, 5, (int(ProposalSource.HISTORY),) * 5)
    before, learned = policy.expected_rate(lane), policy.expected_rate(CohortLane(1, 5))
    for _ in range(20):
        policy.compared(1, int(ProposalSource.HISTORY), passed=5, failed=False)
    assert policy.expected_rate(lane) > 5 > before
    assert policy.expected_rate(CohortLane(1, 5)) == learned


def test_learned_drafts_off_needs_copies():
    with pytest.raises(ValidationError, match="leaves copied drafts alone"):
        SpeculationConfig(learned_drafts=False)


def test_slow_first_rounds_of_copies_alone_price_nothing_and_agreeing_ones_do():
    """Contract C2: their first rounds are recorded, and cost five times as much."""
    one, wide = speculative_shapes(1, (1, 6), 64)
    policy = AdaptivePolicy({one: 4_000_000, wide: 10_000_000})
    copying = CohortLane(1, 5, (int(ProposalSource.REQUEST),) * 5)
    for _ in range(40):
        policy.compared(1, int(ProposalSource.REQUEST), passed=5, failed=False)
    record = msgspec.convert((1, 0, 0, 1, 9, 6, 9, 5, 5, 5, 6, 0, 0, 6, 0, 0, ()), LaneRecord)
    for cost_ns in (50_000_000, 50_000_000, *[6_000_000] * 12):
        assert policy.choose(Cohort((copying,)), (one, wide)) is wide
        told = CompletedRound(wide, (record,), (copying.sources,), copies_alone=True)
        policy.observe(told, cost_ns)
    assert 5e6 < policy.cost.estimate_ns(msgspec.structs.replace(wide, draft_tokens=0)) < 7e6
    assert policy.cost.estimate_ns(wide) > 8e6
    policy.choose(Cohort((copying,)), (one, wide))
    learned = CohortLane(1, 5)
    assert policy.expected_rate(copying) > 1.3 * policy.expected_rate(learned)

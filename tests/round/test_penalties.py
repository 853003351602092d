"""Penalties, bias, min_tokens and bad words under speculation: every width gives the exact law.

Known faults H-08 (penalties ignored) and the probes on logit_bias: contract S2, K3.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import pytest

from flare_ray.contracts.plan import (
    ALWAYS,
    LanePlan,
    LogitRule,
    PrefillLane,
    RoundPlan,
    SlotRestore,
    SnapshotSave,
)
from flare_ray.contracts.shapes import GraphKind
from flare_ray.controller.sampling import seen_bits
from flare_ray.device.sampling import penalties as penalties_module
from flare_ray.device.speculation import round as round_module
from flare_ray.device.state.logits import LogitState
from flare_ray.errors import ContractViolation
from tests.support.exact_sampling import filtered, greedy_text, next_logits, p_value
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Request, Sampling, Setup, scripted_rank

PROMPT = (3, 1, 3)
LANES = 8
ALPHA = 1e-4  # false alarms per test; seeds are fixed, so a pass stays a pass
CAUGHT = 1e-9  # a control's p-value
SCRIPT = Script(vocab_size=8, order=2, seed=4, spread=1.0, draft_noise=0.8)
GREEDY = Script(
    vocab_size=16, order=2, seed=5, spread=2.0, drafter="table", draft_noise=0.3, eos_ids=(6,)
)
FEATURES = {
    "repetition": {"repetition": 1.4},
    "presence": {"presence": 1.2},
    "frequency": {"frequency": 0.15},
    "negative": {"presence": -0.7, "frequency": -0.02, "repetition": 0.9},
    "bias": {"rules": (LogitRule(2, 1.5), LogitRule(5, -100.0), LogitRule(2, -0.5))},
    "min_tokens": {"rules": (LogitRule(6, -math.inf, len(PROMPT) - 1 + 9),)},
    "bad_words": {"bad_words": ((4,), (1, 2), (2, 2, 3), (0, 1, 0, 1, 0, 1, 0, 1))},
    "all": {
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.1,
        "rules": (LogitRule(1, 0.8, ALWAYS), LogitRule(6, -math.inf, 12)),
        "bad_words": ((7, 7), (3,)),
    },
}


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_text_is_the_exact_one_at_every_width(feature, width):
    sampling = Sampling(**FEATURES[feature])
    driver = Driver(scripted_rank(GREEDY))
    request = driver.generate(PROMPT, width=width, budget=40, sampling=sampling)
    assert request.tokens == greedy_text(GREEDY, sampling, PROMPT, 40)
    if width > 1:
        assert sum(record.accepted for record in request.records) > 0


def sampled(sampling: Sampling, width: int, tokens: int = 300) -> list[tuple[tuple, list[int]]]:
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=LANES, context_tokens=512)))
    requests = driver.prefill(
        [
            driver.open(PROMPT, lane, budget=tokens, sampling=replace(sampling, seed=lane))
            for lane in range(LANES)
        ]
    )
    while alive := [request for request in requests if not request.ended]:
        driver.round(alive, width)
    return [(request.prompt, request.tokens) for request in requests]


def law_of(sampling: Sampling):
    return lambda prompt, output: filtered(next_logits(SCRIPT, sampling, prompt, output), sampling)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("feature", FEATURES)
def test_sampled_text_follows_the_exact_conditional_law(feature, width):
    sampling = Sampling(temperature=0.9, top_k=0, top_p=0.95, **FEATURES[feature])
    assert p_value(sampled(sampling, width), law_of(sampling), seed=width) > ALPHA


def test_lanes_with_and_without_penalties_share_a_round():
    driver = Driver(scripted_rank(GREEDY))
    samplings = [Sampling(), *(Sampling(**FEATURES[name]) for name in ("all", "bad_words", "bias"))]
    opened = [driver.open(PROMPT, i, budget=30, sampling=s) for i, s in enumerate(samplings)]
    requests = driver.prefill(opened, chunk=1)
    for width in itertools.cycle((4, 1, 8, 2)):
        if not (alive := [r for r in requests if not r.ended]):
            break
        driver.round(alive, width)
    for request, sampling in zip(requests, samplings, strict=True):
        assert request.tokens == greedy_text(GREEDY, sampling, PROMPT, 30)


def test_slot_that_had_penalties_forgets_them():
    driver = Driver(scripted_rank(GREEDY))
    for sampling in (Sampling(**FEATURES["all"]), Sampling(), Sampling(**FEATURES["presence"])):
        request = driver.generate(PROMPT, width=4, budget=30, sampling=sampling)
        assert request.tokens == greedy_text(GREEDY, sampling, PROMPT, 30)


@pytest.mark.parametrize("after", [1, 2, 11])
@pytest.mark.parametrize("feature", ["all", "repetition", "frequency", "bad_words"])
def test_resumed_request_goes_on_as_if_it_had_never_stopped(feature, after):
    """Prompt and output come back as one prompt; the last token is pending (preemption)."""
    sampling = Sampling(**FEATURES[feature])
    script = Script(vocab_size=16, order=2, seed=5, spread=2.0, draft_noise=0.3)
    expected = greedy_text(script, sampling, PROMPT, 30)
    driver = Driver(scripted_rank(script))
    opened, init, grant = driver.open(
        (*PROMPT, *expected[: after - 1]), 0, budget=30 - after, sampling=sampling
    )
    values = [getattr(init, name) for name in init.__struct_fields__]
    values[init.__struct_fields__.index("generated_from")] = len(PROMPT)
    lane = PrefillLane(0, init.epoch, 0, opened.prompt, True, expected[after - 1])
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    resumed = type(init)(*values)
    driver.submit(RoundPlan(1, shape, (resumed,), (grant,), prefill=(lane,), context_pages=1))
    next(driver.round_ids)
    while not opened.ended:
        driver.round([opened], 4)
    assert opened.tokens == expected[after:]


PREFIX = (3, 1, 3, 9, 11)


def restored(sampling: Sampling, seen: bytes, tail: tuple[int, ...] = (2,)) -> Request:
    """PREFIX is captured from one request and restored into another, which goes on with `tail`;
    without one its first token comes from the saved head input."""
    driver = Driver(scripted_rank(GREEDY, Setup(snapshot_rows=2)))
    first, init, grant = driver.open(PREFIX, 0)
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    lane = PrefillLane(0, first.epoch, 0, PREFIX, True)
    kept = SnapshotSave(0, first.epoch, len(PREFIX), 1, True)
    number = driver.round_ids
    driver.submit(
        RoundPlan(next(number), shape, (init,), (grant,), (), (lane,), 1, captures=(kept,))
    )
    second, init, grant = driver.open((*PREFIX, *tail), 1, budget=30, sampling=sampling)
    init = msgspec.structs.replace(init, seen=seen)
    lane = PrefillLane(1, second.epoch, len(PREFIX), tail, True)
    move = SlotRestore(1, second.epoch, 1, len(PREFIX), first.pages[0], second.pages[0])
    if not tail:
        shape = driver.shape(GraphKind.RESUME, 1, 1, True)
    plan = RoundPlan(next(number), shape, (init,), (grant,), (), (lane,), 1, restores=(move,))
    driver._note([second], driver.submit(plan))
    while not second.ended:
        driver.round([second], 4)
    return second


@pytest.mark.parametrize("tail", [(), (2,)])
@pytest.mark.parametrize("feature", FEATURES)
def test_restored_prefix_is_treated_as_if_it_had_been_consumed(feature, tail):
    sampling = Sampling(**FEATURES[feature])
    request = restored(sampling, seen_bits(PREFIX, GREEDY.vocab_size), tail)
    assert request.tokens == greedy_text(GREEDY, sampling, request.prompt, 30)


@pytest.mark.parametrize("tail", [(), (2,)])
def test_restored_prefix_changes_no_reproducible_text_and_no_score(tail):
    sampling = Sampling(0.9, 0, seed=5, coupled=True, top_logprobs=2, **FEATURES["all"])
    warm = restored(sampling, seen_bits(PREFIX, GREEDY.vocab_size), tail)
    cold = Driver(scripted_rank(GREEDY)).generate(
        (*PREFIX, *tail), width=1, budget=30, sampling=sampling
    )
    assert warm.tokens == cold.tokens
    assert b"".join(r.scores for r in warm.records) == b"".join(r.scores for r in cold.records)


def test_restore_that_hides_the_prompt_from_a_repetition_penalty_is_refused():
    with pytest.raises(ContractViolation, match="seen"):
        restored(Sampling(repetition=1.3), b"")


# Controls: the same statistic must catch each of these.

PENALISED = Sampling(temperature=0.9, top_k=0, frequency=0.15)


def test_rejected_drafts_that_count_are_caught(monkeypatch):
    original = round_module.count_emitted

    def counts_all(rows, tokens, emitted, request, bounds):
        original(rows, rows.tokens[:, 1:], rows.lengths - 1, request, bounds)

    monkeypatch.setattr(round_module, "count_emitted", counts_all)
    assert p_value(sampled(PENALISED, 5), law_of(PENALISED), seed=0) < CAUGHT


def test_counts_that_ignore_the_drafts_before_a_row_are_caught(monkeypatch):
    original = penalties_module.penalise

    def blind(logits, counts, drafts, penalties):
        return original(logits, counts, drafts[:, :0], penalties)

    monkeypatch.setattr("flare_ray.device.speculation.logits.penalise", blind)
    strong = Sampling(temperature=0.9, top_k=0, frequency=2.0)
    assert p_value(sampled(strong, 5), law_of(strong), seed=0) < CAUGHT


def test_penalties_left_out_are_caught(monkeypatch):
    monkeypatch.setattr(LogitState, "count_generated", lambda *_: None)
    assert p_value(sampled(PENALISED, 1), law_of(PENALISED), seed=0) < CAUGHT


def test_lane_ceiling_zero_counts_like_any_other():
    sampling = Sampling(**FEATURES["all"])
    driver = Driver(scripted_rank(GREEDY))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=20, sampling=sampling)])
    while not request.ended:
        driver.round([request], 4, lanes=[LanePlan(0, request.epoch, 0)])
    assert request.tokens == greedy_text(GREEDY, sampling, PROMPT, 20)

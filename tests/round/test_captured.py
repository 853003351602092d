"""The captured backend without a device: variants, staging, barriers, freeze (contract: G2, G4)."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from flare_ray.contracts.plan import LanePlan
from flare_ray.contracts.record import unpack_rows
from flare_ray.contracts.shapes import (
    GraphKind,
    GraphShape,
    decode_shapes,
    masked_shapes,
    speculative_shapes,
)
from flare_ray.device.graphs.variants import Variant, count_graphs, covers, variants
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.speculation.inputs import FilterBounds, HostFacts, Staging, StaticBuffer
from flare_ray.errors import ConfigError, ContractViolation
from tests.support.fake_graphs import CallRecorder
from tests.support.mixed_rounds import play
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import (
    Driver,
    Sampling,
    Setup,
    scripted_manifest,
    scripted_rank,
)

SCRIPT = Script(vocab_size=48, order=2, seed=7)
SETUP = Setup(
    slots=2,
    widths=(1, 2, 4),
    publication=True,
    snapshot_rows=2,
    prefill_tokens=32,
    context_tokens=256,
)


def captured_rank(setup: Setup = SETUP):
    recorder = CallRecorder()
    rank = scripted_rank(SCRIPT, setup, recorder=recorder)
    rank.warm()
    return rank, recorder


@pytest.fixture(scope="module")
def captured():
    """One rank for tests that only look at what was recorded."""
    return captured_rank()


def test_captured_programs_give_the_records_of_eager_ones():
    eager, captured = (Driver(rank) for rank in (scripted_rank(SCRIPT, SETUP), captured_rank()[0]))
    for driver in (eager, captured):
        play(driver, SETUP.widths)
    assert [r[0].scores for r in captured.replies] == [r[0].scores for r in eager.replies]
    assert [unpack_rows(r[0].rows) for r in captured.replies] == [
        unpack_rows(r[0].rows) for r in eager.replies
    ]
    assert any(r[0].scores for r in eager.replies)


def test_one_stale_fact_at_capture_is_seen_by_the_same_comparison(monkeypatch):
    """Negative control: a program that was captured without penalties serves one that has some."""
    monkeypatch.setattr("flare_ray.device.graphs.captured.covers", lambda fixed, needed: True)
    eager, captured = (Driver(rank) for rank in (scripted_rank(SCRIPT, SETUP), captured_rank()[0]))
    for driver in (eager, captured):
        play(driver, SETUP.widths)
    assert [r[0].rows for r in captured.replies] != [r[0].rows for r in eager.replies]


def test_alternating_programs_padded_lanes_and_poisoned_scratch_change_no_record():
    clean, poisoned = (Driver(captured_rank()[0]) for _ in range(2))
    play(clean, SETUP.widths)
    submit = poisoned.submit

    def poison_and_submit(plan, masks=None):
        poisoned.ranks[0].backend.arena.poison()
        return submit(plan, masks)

    poisoned.submit = poison_and_submit
    play(poisoned, SETUP.widths)
    assert [r[0].rows for r in poisoned.replies] == [r[0].rows for r in clean.replies]


def test_a_program_that_allocates_after_the_freeze_stops_the_engine():
    rank, recorder = captured_rank()
    driver = Driver(rank)
    (request,) = driver.prefill([driver.open((1, 2), 0)])
    driver.round([request], 2)
    recorder.leak_bytes = 512
    with pytest.raises(ContractViolation, match="allocated 512 bytes"):
        driver.round([request], 2)


def test_every_variant_is_warmed_before_anything_is_recorded_and_nothing_after_the_freeze(captured):
    rank, recorder = captured
    assert recorder.finished
    assert recorder.warmed == len(recorder.graphs) == count_graphs(rank.manifest.shapes)
    assert rank.backend.pool_bytes == 1 << 20


def test_failed_capture_stops_the_start_by_name(monkeypatch):
    recorder = CallRecorder()
    rank = scripted_rank(SCRIPT, SETUP, recorder=recorder)

    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", refuse)
    with pytest.raises(ConfigError, match=r"cannot be captured.*eager: true"):
        rank.warm()


def test_concurrency_four_with_five_drafts_has_eighteen_speculative_entries():
    shapes = speculative_shapes(4, tuple(range(1, 7)), 128)
    assert len(shapes) == 18
    # each in a plain and a full recording; a fixed width selects three entries
    assert count_graphs(shapes) == 36
    assert len([s for s in shapes if s.verify_width == 4]) == 3
    barriers = 15
    assert count_graphs(masked_shapes(shapes)) == 18 + barriers
    assert count_graphs(decode_shapes(4)) == 6


def test_wide_and_block_widths_are_counted_alike():
    assert len(speculative_shapes(4, (1, 2, 4, 8), 128)) == 12


@pytest.mark.parametrize(
    ("change", "variant"),
    [
        ({}, "plain"),
        ({"max_top_k": 40}, "plain"),
        ({"max_top_k": 65}, "full"),
        ({"any_top_p": True, "any_min_p": True}, "plain"),
        ({"every_lane_greedy": True, "max_top_k": 1}, "plain"),
        ({"any_penalty": True}, "full"),
        ({"max_rules": 1}, "full"),
        ({"max_bad_words": 1}, "full"),
        ({"any_coupled": True, "every_lane_coupled": True}, "full"),
        ({"max_top_logprobs": 0}, "full"),
    ],
)
def test_plan_gets_the_cheapest_variant_that_covers_it(change, variant):
    shape = decode_shapes(1)[0]
    script = dataclasses.replace(SCRIPT, vocab_size=200)
    kinds = variants(shape, scripted_manifest(script, SETUP), columns=5)
    needed = HostFacts(2, 1, False, False, True, FilterBounds(**change), publishes=False)
    chosen = next(kind for kind in kinds if covers(kind.facts, needed))
    assert chosen.name == variant


@pytest.mark.parametrize(
    "fields",
    [{"context_pages": 6}, {"rows": 2}, {"masked": True}, {"copies": True}],
)
def test_facts_beyond_the_capture_are_not_covered(fields):
    shape = decode_shapes(1)[0]
    kinds: tuple[Variant, ...] = variants(shape, scripted_manifest(SCRIPT, SETUP), columns=5)
    base = HostFacts(5, 1, False, False, True, FilterBounds())
    assert covers(kinds[-1].facts, base)
    assert not covers(kinds[-1].facts, dataclasses.replace(base, **fields))


def test_a_shortcut_for_all_lanes_covers_only_plans_whose_lanes_all_take_it():
    greedy = HostFacts(1, 1, False, False, True, FilterBounds(1, every_lane_greedy=True))
    assert covers(greedy, greedy)
    assert not covers(greedy, dataclasses.replace(greedy, filters=FilterBounds(1)))


def test_publishing_round_of_plain_lanes_takes_the_full_variant(captured):
    rank, _ = captured
    driver = Driver(rank)
    (request,) = driver.prefill([driver.open(tuple(range(40)), 0, budget=60)], chunk=24)
    seen = []
    while not request.ended and len(seen) < 40:
        driver.round([request], 1)
        shape = driver.shape(GraphKind.SPECULATIVE, 1, 1, True)
        seen.append(rank.backend.program(shape).variant)
    assert seen.count("full") == 1  # the row at position 64
    driver.close(request)


class CountedFence:
    """A fence that counts the waits for what it has marked."""

    def __init__(self) -> None:
        self.waits = 0
        self.marked = False

    def record(self) -> None:
        self.marked = True

    def synchronize(self) -> None:
        self.waits += self.marked


def test_inputs_of_a_queued_plan_leave_those_on_their_way_alone():
    fences = CountedFence(), CountedFence()
    sets = [torch.zeros(6, dtype=torch.int64) for _ in fences]
    buffer = StaticBuffer(torch.zeros(6, dtype=torch.int64), Staging(sets, fences))
    narrow, wide = buffer.view((2,)), buffer.view((2, 3))
    narrow.renew()
    narrow.host[:] = 1
    on_its_way = narrow.host
    narrow.upload()
    assert narrow.tensor.tolist() == [1, 1]
    wide.renew()
    wide.host[:] = 2
    assert on_its_way.tolist() == [1, 1]
    assert fences[1].waits == 0  # the other staging was free
    wide.upload()
    narrow.renew()
    assert [fence.waits for fence in fences] == [0, 1]  # its last copy is waited for


def priced(rank) -> set[GraphShape]:
    rounds = (GraphKind.DECODE, GraphKind.SPECULATIVE)
    return {s for s in rank.manifest.shapes if s.kind in rounds}


def test_prices_name_every_round_and_no_prompt(captured):
    rank, _ = captured
    rank.price()
    assert {shape for shape, _ in rank.manifest.prices} == priced(rank)
    assert all(cost > 0 for _, cost in rank.manifest.prices)


def test_eager_programs_are_priced_by_their_own_runs():
    rank = scripted_rank(SCRIPT, SETUP)
    rank.warm()
    rank.price()
    assert {shape for shape, _ in rank.manifest.prices} == priced(rank)
    assert all(cost > 0 for _, cost in rank.manifest.prices)
    msgspec.json.encode(rank.manifest.prices)


def test_rounds_with_masks_may_cost_what_their_twins_do(captured):
    eager = scripted_rank(SCRIPT, SETUP)
    eager.warm()
    for rank in (captured[0], eager):
        rank.price(masked=False)
        costs = dict(rank.manifest.prices)
        assert set(costs) == priced(rank)
        masked = [shape for shape in costs if shape.masked]
        assert masked
        for shape in masked:
            assert costs[shape] == costs[msgspec.structs.replace(shape, masked=False)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", SETUP.widths)
def test_priced_programs_have_recorded_what_requests_of_the_usual_kind_need(width, masked):
    """Their first rounds are replays; without prices the third one of each part is."""
    words = mask_words(SCRIPT.vocab_size)
    seen = []
    for priced_first in (True, False):
        rank = scripted_rank(SCRIPT, SETUP)
        rank.warm()
        if priced_first:
            rank.price()
        driver = Driver(rank)
        usual = Sampling(top_k=0)
        requests = driver.prefill([driver.open([1, 2, 3], 0, budget=60, sampling=usual)])
        masks = np.full((width, words), -1, np.int32) if masked else None
        lane = LanePlan(0, requests[0].epoch, width - 1, mask_row=0 if masked else -1)
        for _ in range(4):
            driver.round(requests, width, lanes=[lane], masks=masks)
        seen.append([replies[0].is_usual for replies in driver.replies[1:]])
    assert seen[0] == [True] * 4
    assert seen[1] == [False, False, not (masked and width > 1), True]

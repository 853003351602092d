"""EOS, budget and their records; the last emitted token stays pending (contract: T3)."""

import pytest

from flare_ray.contracts.record import Status
from flare_ray.device.state.layout import Core, Phase
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

A, B, EOS, C, D = 1, 2, 3, 4, 5
# a -> b -> eos -> c -> d -> a ...; other tokens lead to a
CYCLE = (A, B, EOS, C, D, A, A, A)


def cycle_script(**changes) -> Script:
    fields = {
        "vocab_size": 8,
        "next_tokens": CYCLE,
        "drafter": "prefix",
        "draft_right": 7,
        "eos_ids": (EOS,),
    }
    return Script(**{**fields, **changes})


def one_slot(script: Script) -> Driver:
    return Driver(scripted_rank(script, Setup(slots=1)))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", range(1, 10))
def test_accepted_drafts_never_pass_the_output_budget(width, budget):
    driver = one_slot(cycle_script(eos_ids=()))
    request = driver.generate([0, 0, 0], width=width, budget=budget)
    last = request.records[-1]
    assert len(request.tokens) == budget == last.generated
    assert last.status == Status.ACTIVE | Status.LENGTH
    assert last.consumed == 3 + budget - 1
    assert last.budget_left == 0
    row = driver.ranks[0].store.request.core[0]
    assert int(row[Core.PENDING]) == request.tokens[-1]
    assert int(row[Core.PHASE]) == Phase.ENDED


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_commit_keeps_eos_pending_when_clipped_inside_accepted_prefix(width):
    driver = one_slot(cycle_script())
    request = driver.generate([0], width=width, budget=16)
    last = request.records[-1]
    assert request.tokens == [A, B, EOS]
    assert last.status == Status.ACTIVE | Status.EOS
    assert last.consumed == 1 + 3 - 1
    row = driver.ranks[0].store.request.core[0]
    assert int(row[Core.PENDING]) == EOS
    driver.ranks[0].check_integrity()


def test_request_without_eos_ids_continues_through():
    driver = one_slot(cycle_script())
    opened = driver.open([0], 0, budget=12, eos=())
    (request,) = driver.prefill([opened])
    while not request.ended:
        driver.round([request], 8)
    assert request.tokens == [A, B, EOS, C, D, A, B, EOS, C, D, A, B]


def test_state_after_an_eos_clip_is_that_of_the_clipped_prefix():
    """The columns of rows beyond the EOS were written but never become live."""
    driver = one_slot(cycle_script())
    wide = driver.generate([0], width=8, budget=16)
    store = driver.ranks[0].store
    live = store.groups["hash_column"][0, store.request.core[0, Core.COLUMN]].clone()
    total = store.groups["total_row"][0].clone()
    other = one_slot(cycle_script())
    narrow = other.generate([0], width=1, budget=16)
    store = other.ranks[0].store
    assert wide.tokens == narrow.tokens
    assert live == store.groups["hash_column"][0, store.request.core[0, Core.COLUMN]] == total


def test_first_token_that_is_eos_ends_the_request_in_its_prefill():
    driver = one_slot(cycle_script())
    opened = driver.open([A, B], 0)
    (request,) = driver.prefill([opened])
    assert request.tokens == [EOS]
    assert request.records[-1].status == Status.ACTIVE | Status.EOS
    assert request.records[-1].generated == 1
    (record,) = driver.round([request], 4)
    assert record.status == Status.IDLE


def test_eos_that_spends_the_budget_reports_both():
    driver = one_slot(cycle_script())
    request = driver.generate([0], width=4, budget=3)
    assert request.records[-1].status == Status.ACTIVE | Status.EOS | Status.LENGTH


@pytest.mark.parametrize("eos_count", [1, 2, 16])
def test_any_of_the_slots_eos_ids_ends_it(eos_count):
    script = Script(
        vocab_size=64,
        next_tokens=tuple((t + 1) % 64 for t in range(64)),
        drafter="prefix",
        draft_right=7,
    )
    driver = one_slot(script)
    eos = tuple(range(60, 60 - eos_count, -1))
    opened = driver.open([30], 0, budget=40, eos=eos)
    (request,) = driver.prefill([opened])
    while not request.ended:
        driver.round([request], 8)
    assert request.tokens[-1] == min(eos)


def test_drafts_beyond_the_budget_are_not_offered():
    driver = one_slot(cycle_script(eos_ids=()))
    (request,) = driver.prefill([driver.open([0], 0, budget=4)])
    (record,) = driver.round([request], 8)
    assert (record.drafted, record.offered, record.emitted) == (7, 2, 3)

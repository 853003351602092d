"""Prompts: cut anywhere, several at once, resumed; the state they leave (contract: R8, T1)."""

import pytest
import torch

from flare_ray.contracts.plan import PrefillLane, RoundPlan
from flare_ray.contracts.record import Flag, Status
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.state.layout import Core, Phase
from tests.round.live_state import live_state, pairs_of
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

SCRIPT = Script(vocab_size=32, order=2, seed=5, draft_noise=1.0)
SETUP = Setup(slots=2, prefill_tokens=256)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((7 * i * i + 3 * i) % 32 for i in range(length))


def filled(prompt, chunk: int):
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    (request,) = driver.prefill([driver.open(prompt, 0, budget=20)], chunk=chunk)
    return driver, request


@pytest.mark.parametrize("length", [1, 2, 3, 4, 13, 63, 64, 65, 130])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 63, 64, 65])
def test_chunking_leaves_the_same_state_and_text(length, chunk):
    prompt = prompt_of(length)
    whole_driver, whole = filled(prompt, 0)
    driver, request = filled(prompt, chunk)
    assert live_state(driver.ranks[0], request) == live_state(whole_driver.ranks[0], whole)
    while not request.ended:
        driver.round([request], 5)
    assert request.tokens == plain_text(SCRIPT, prompt, 20)


@pytest.mark.parametrize("length", [1, 2, 64, 130])
def test_prompt_leaves_one_pair_less_than_tokens(length):
    driver, request = filled(prompt_of(length), 7)
    record = request.records[-1]
    assert record.consumed == length
    assert record.draft_position == length - 1
    stored = driver.ranks[0].store.groups["pair_pages"]
    expected = pairs_of([*request.prompt])
    assert torch.equal(stored[list(request.pages)].flatten(0, 1)[: length - 1], expected)


def test_prompts_of_different_lengths_share_a_program():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=4, prefill_tokens=64)))
    prompts = [prompt_of(n) for n in (1, 40, 16, 33)]
    requests = driver.prefill([driver.open(p, i, budget=10) for i, p in enumerate(prompts)])
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, 3)
    for request in requests:
        assert request.tokens == plain_text(SCRIPT, request.prompt, 10)
    driver.ranks[0].check_integrity()


def test_prefill_beside_a_decoding_lane_leaves_it_alone():
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    (a,) = driver.prefill([driver.open(prompt_of(9), 0, budget=30)])
    driver.round([a], 4)
    (b,) = driver.prefill([driver.open(prompt_of(70), 1, budget=30)], chunk=16)
    while alive := [r for r in (a, b) if not r.ended]:
        driver.round(alive, 4)
    assert a.tokens == plain_text(SCRIPT, a.prompt, 30)
    assert b.tokens == plain_text(SCRIPT, b.prompt, 30)


def test_records_tell_chunks_from_the_first_token():
    _, request = filled(prompt_of(10), 4)
    first, second, last = request.records
    assert first.flags == second.flags == Flag.PREFILL
    assert (first.consumed, second.consumed, last.consumed) == (4, 8, 10)
    assert first.emitted == second.emitted == first.generated == 0
    assert last.flags == Flag.PREFILL | Flag.FIRST_TOKEN
    assert (last.emitted, last.generated, last.budget_left) == (1, 1, 19)


def test_resume_continues_where_the_preempted_request_stood():
    """After preemption prompt and output are consumed again; the pending token is given."""
    prompt = prompt_of(20)
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    (request,) = driver.prefill([driver.open(prompt, 0, budget=30)])
    for _ in range(3):
        driver.round([request], 5)
    tokens, left = list(request.tokens), request.records[-1].budget_left
    before = live_state(driver.ranks[0], request)
    opened = driver.open((*prompt, *tokens[:-1]), 1, budget=left)
    (resumed,) = driver.prefill([opened], chunk=8, pending=tokens[-1])
    record = resumed.records[-1]
    assert record.flags == Flag.PREFILL
    assert (record.emitted, record.generated, record.budget_left) == (0, 0, left)
    assert live_state(driver.ranks[0], resumed) == before
    while not resumed.ended:
        driver.round([resumed], 5)
    assert tokens + resumed.tokens == plain_text(SCRIPT, prompt, 30)


def test_resume_with_an_eos_pending_ends_at_once():
    script = Script(vocab_size=32, order=2, seed=5, eos_ids=(9,))
    driver = Driver(scripted_rank(script, SETUP))
    (request,) = driver.prefill([driver.open(prompt_of(4), 0)], pending=9)
    assert request.records[-1].status == Status.ACTIVE | Status.EOS
    core = driver.ranks[0].store.request.core[0]
    assert int(core[Core.PHASE]) == Phase.ENDED


def test_chunk_sent_twice_changes_nothing_on_the_device():
    """The ledger refuses it first; here the device's own check is asked."""
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    rank = driver.ranks[0]
    request, init, grant = driver.open(prompt_of(6), 0)
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    lane = PrefillLane(0, request.epoch, 0, prompt_of(6)[:3], False)
    driver.submit(RoundPlan(1, shape, (init,), (grant,), (), (lane,), 1))
    before = live_state(rank, request)
    program = rank.backend.program(shape)
    with torch.inference_mode():
        again = RoundPlan(2, shape, prefill=(lane,), context_pages=1)
        program.prepare(again, None, rank._bounds(again))
        program.replay()
    assert int(program.record[0, 3]) == Status.IDLE
    assert live_state(rank, request) == before


def test_slot_reuse_starts_from_an_empty_history():
    driver = Driver(scripted_rank(SCRIPT, SETUP))
    rank = driver.ranks[0]
    (old,) = driver.prefill([driver.open(prompt_of(50), 0, budget=40)])
    driver.round([old], 8)
    with torch.inference_mode():
        for name, tensor in rank.store.groups.items():
            if name.endswith(("column", "window")):
                tensor[0, 1:] = 12345  # what a former owner left beyond the live entries
    new = driver.generate(prompt_of(5), width=6, budget=20, slot=0)
    assert new.tokens == plain_text(SCRIPT, new.prompt, 20)

"""A slot restored from a snapshot goes on as one that consumed the prefix (contract: M4)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from flare_ray.contracts.plan import PageGrant, PrefillLane, RoundPlan, SlotRestore, SnapshotSave
from flare_ray.contracts.shapes import PAGE_TOKENS, GraphKind
from flare_ray.errors import ContractViolation
from tests.round.live_state import live_state
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Request, Sampling, Setup, scripted_rank

SCRIPT = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=7)
LENGTHS = (1, 2, 3, 11, 12, 13, 63, 64, 65, 127, 128, 129)
"""Around pages, and around the scripted ring's twelve entries."""
TAIL = (5, 9, 2)
ROW = 2


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((5 * i * i + i) % 16 for i in range(length))


def engine(**changes) -> Driver:
    fields = {"slots": 3, "snapshot_rows": 4, "prefill_tokens": 256}
    return Driver(scripted_rank(SCRIPT, Setup(**{**fields, **changes})))


def consume(driver: Driver, prompt, slot: int, *, capture: int = -1, budget: int = 60) -> Request:
    """Prefill a whole prompt in one program, with a capture of its end in row `capture`."""
    request, init, grant = driver.open(prompt, slot, budget=budget)
    plan = RoundPlan(
        round_id=next(driver.round_ids),
        shape=driver.shape(GraphKind.PREFILL, 1, 0, True),
        inits=(init,),
        grants=(grant,),
        prefill=(PrefillLane(slot, request.epoch, 0, request.prompt, True),),
        captures=(SnapshotSave(slot, request.epoch, len(prompt), capture, True),)
        if capture >= 0
        else (),
    )
    driver._note([request], driver.submit(plan))
    return request


def restored_plan(driver: Driver, origin: Request, length: int, tail, slot: int, **saves):
    """A plan that continues `origin`'s first `length` tokens, held by ROW, with `tail`."""
    history = (*origin.prompt, *origin.tokens)[:length]
    request, init, _ = driver.open((*history, *tail), slot, budget=60)
    shared = (length - 1) // PAGE_TOKENS
    request.pages = (*origin.pages[:shared], *request.pages[shared:])
    plan = RoundPlan(
        round_id=next(driver.round_ids),
        shape=driver.shape(GraphKind.PREFILL, 1, 0, True),
        inits=(init,),
        grants=(PageGrant(slot, 0, request.pages),),
        prefill=(PrefillLane(slot, request.epoch, length, tuple(tail), True),),
        restores=(
            SlotRestore(
                slot, request.epoch, ROW, length, origin.pages[shared], request.pages[shared]
            ),
        ),
        **saves,
    )
    return request, plan


def restore(driver: Driver, origin: Request, length: int, tail, slot: int, **saves) -> Request:
    request, plan = restored_plan(driver, origin, length, tail, slot, **saves)
    driver._note([request], driver.submit(plan))
    return request


def finish(driver: Driver, *requests: Request, width: int = 8) -> None:
    while any(not request.ended for request in requests):
        driver.round([request for request in requests if not request.ended], width)
    driver.ranks[0].check_integrity()


def assert_as_if_cold(request: Request) -> None:
    """The text is the model's own, and every draft was right: no part of the state is damaged."""
    assert request.tokens == plain_text(SCRIPT, request.prompt, 60)
    assert all(r.emitted == 8 for r in request.records[1:-1])


@pytest.mark.parametrize("length", LENGTHS)
def test_branch_of_a_captured_prompt_equals_a_cold_run(length):
    driver = engine()
    origin = consume(driver, prompt_of(length), 0, capture=ROW)
    branch = restore(driver, origin, length, TAIL, 1)
    finish(driver, origin, branch)
    assert_as_if_cold(origin)
    assert_as_if_cold(branch)


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_tpu_inference_3358_and_3412_every_part_of_a_branch_is_a_cold_runs(length, rounds):
    states = []
    for is_cold in (False, True):
        driver = engine()
        origin = consume(driver, prompt_of(length), 0, capture=ROW)
        if is_cold:
            branch = consume(driver, (*prompt_of(length), *TAIL), 1)
        else:
            branch = restore(driver, origin, length, TAIL, 1)
        for _ in range(rounds):
            driver.round([branch], 8)
        states.append(live_state(driver.ranks[0], branch))
    assert states[0] == states[1]


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_snapshot_outlives_the_request_it_came_from(length):
    driver = engine()
    origin = consume(driver, prompt_of(length), 0, capture=ROW)
    finish(driver, origin)
    other = consume(driver, prompt_of(20)[::-1], 0)
    first = restore(driver, origin, length, TAIL, 1)
    second = restore(driver, origin, length, TAIL[::-1], 2)
    finish(driver, other, first, second)
    for request in (other, first, second):
        assert_as_if_cold(request)


@pytest.mark.parametrize("prompt", [56, 64 + 56])
def test_publication_row_of_a_round_is_saved_after_later_rounds(prompt):
    driver = engine()
    origin = consume(driver, prompt_of(prompt), 0)
    for _ in range(3):
        driver.round([origin], 8)
    length = prompt + 8
    save = SnapshotSave(0, origin.epoch, length, ROW)
    branch = restore(driver, origin, length, TAIL, 1, saves=(save,))
    finish(driver, origin, branch)
    assert_as_if_cold(origin)
    assert_as_if_cold(branch)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_live_state_of_an_ended_request_is_saved_before_its_slot_is_reused(rounds):
    driver = engine()
    origin = consume(driver, prompt_of(40), 0, budget=1 + 8 * rounds)
    finish(driver, origin)
    length = origin.records[-1].consumed
    save = SnapshotSave(0, origin.epoch, length, ROW, True)
    branch = restore(driver, origin, length, TAIL, 0, saves=(save,))
    finish(driver, branch)
    assert_as_if_cold(branch)


def test_one_snapshot_starts_a_chain_of_snapshots():
    driver = engine()
    origin = consume(driver, prompt_of(70), 0, capture=ROW)
    second = SnapshotSave(1, 0, 73, ROW, True)
    request, plan = restored_plan(driver, origin, 70, TAIL, 1)
    second = msgspec.structs.replace(second, epoch=request.epoch)
    driver._note([request], driver.submit(msgspec.structs.replace(plan, captures=(second,))))
    last = restore(driver, request, 73, TAIL, 2)
    finish(driver, origin, request, last)
    for each in (origin, request, last):
        assert_as_if_cold(each)


def test_captures_do_not_change_the_text_of_the_ordinary_family():
    driver = engine()
    request, init, grant = driver.open(prompt_of(64), 0, budget=20)
    plan = RoundPlan(
        round_id=next(driver.round_ids),
        shape=driver.shape(GraphKind.PREFILL, 1, 0, False),
        inits=(init,),
        grants=(grant,),
        prefill=(PrefillLane(0, request.epoch, 0, request.prompt, True),),
        captures=(SnapshotSave(0, request.epoch, 64, ROW, True),),
    )
    driver._note([request], driver.submit(plan))
    while not request.ended:
        driver.round([request], 1, speculation=False)
    assert request.tokens == plain_text(SCRIPT, request.prompt, 20)


# Refusals, and a control: the comparison must catch a fault of each kind.


def broken(plan: RoundPlan, **changes) -> RoundPlan:
    (restore_,) = plan.restores
    return msgspec.structs.replace(plan, restores=(msgspec.structs.replace(restore_, **changes),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row": 3}, "holds None"),
        ({"row": 9}, "no such row"),
        ({"consumed": 65}, "planned were 65"),
        ({"epoch": 99}, "not handed over"),
        ({"source_page": 0}, "outside"),
    ],
)
def test_wrong_restore_is_refused(changes, words):
    driver = engine()
    origin = consume(driver, prompt_of(66), 0, capture=ROW)
    _, plan = restored_plan(driver, origin, 66, TAIL, 1)
    with pytest.raises(ContractViolation, match=words):
        driver.submit(broken(plan, **changes))


def test_save_of_a_boundary_that_was_not_published_is_refused():
    driver = engine()
    origin = consume(driver, prompt_of(60), 0)
    driver.round([origin], 8)
    save = SnapshotSave(0, origin.epoch, 128, ROW)
    _, plan = restored_plan(driver, origin, 128, TAIL, 1, saves=(save,))
    with pytest.raises(ContractViolation, match="publication row holds 64"):
        driver.submit(plan)


def test_snapshot_of_the_other_family_is_refused():
    driver = engine()
    origin = consume(driver, prompt_of(66), 0, capture=ROW)
    _, plan = restored_plan(driver, origin, 66, TAIL, 1)
    ordinary = driver.shape(GraphKind.PREFILL, 1, 0, False)
    with pytest.raises(ContractViolation, match="other kind"):
        driver.submit(msgspec.structs.replace(plan, shape=ordinary))


def damaged_branch(group: str) -> tuple[Driver, Request]:
    driver = engine()
    origin = consume(driver, prompt_of(66), 0, capture=ROW)
    with torch.inference_mode():
        driver.ranks[0].store.snapshots.rows[group][ROW] += 1
    return driver, restore(driver, origin, 66, TAIL, 1)


@pytest.mark.parametrize("group", ["hash_column", "recent_window", "recent_ring", "total_row"])
def test_one_stale_part_of_a_snapshot_would_be_caught_by_the_text(group):
    driver, branch = damaged_branch(group)
    finish(driver, branch)
    with pytest.raises(AssertionError):
        assert_as_if_cold(branch)


def test_a_stale_ring_of_the_drafter_would_be_caught_by_its_live_part():
    driver, branch = damaged_branch("pair_ring")
    cold = engine()
    request = consume(cold, (*prompt_of(66), *TAIL), 1)
    got, expected = live_state(driver.ranks[0], branch), live_state(cold.ranks[0], request)
    assert [name for name in got if got[name] != expected[name]] == ["pair_ring"]


def test_shared_last_page_would_be_caught():
    """Two continuations of one boundary each complete the pair at N - 1: they must not share it."""
    driver = engine()
    origin = consume(driver, prompt_of(64), 0, capture=ROW)
    branch, plan = restored_plan(driver, origin, 64, TAIL, 1)
    shared = (origin.pages[0], *branch.pages[1:])
    plan = msgspec.structs.replace(plan, grants=(PageGrant(1, 0, shared),))
    driver._note([branch], driver.submit(broken(plan, target_page=origin.pages[0])))
    finish(driver, origin, branch)
    with pytest.raises(AssertionError):
        assert_as_if_cold(origin)
        assert_as_if_cold(branch)


# Full hits.


def resume_plan(driver: Driver, origin: Request, length: int, slot: int, **lane) -> tuple:
    request, plan = restored_plan(driver, origin, length, (), slot)
    whole = PrefillLane(slot, request.epoch, length, (), True, **lane)
    shape = driver.shape(GraphKind.RESUME, 1, 1, True)
    return request, msgspec.structs.replace(plan, shape=shape, prefill=(whole,))


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt_is_sampled_from_the_saved_head_input(length):
    driver = engine()
    origin = consume(driver, prompt_of(length), 0, capture=ROW)
    again, plan = resume_plan(driver, origin, length, 1)
    driver._note([again], driver.submit(plan))
    assert again.tokens == origin.tokens[:1]
    finish(driver, origin, again)
    assert_as_if_cold(again)


def test_sampled_text_of_a_full_hit_is_that_of_its_seed():
    sampling = Sampling(temperature=1.3, top_k=0, seed=77)
    spread = Script(vocab_size=16, order=2, seed=3, draft_noise=1.0)
    texts = []
    for is_cold in (True, False):
        driver = Driver(scripted_rank(spread, Setup(slots=3, snapshot_rows=4)))
        origin = consume(driver, prompt_of(50), 0, capture=ROW)
        if is_cold:
            opened = driver.open(prompt_of(50), 1, budget=30, sampling=sampling)
            (request,) = driver.prefill([opened])
        else:
            request, plan = resume_plan(driver, origin, 50, 1)
            (init,) = plan.inits
            init = msgspec.structs.replace(init, temperature=1.3, top_k=0, seed=77, budget=30)
            driver._note([request], driver.submit(msgspec.structs.replace(plan, inits=(init,))))
        while not request.ended:
            driver.round([request], 4)
        texts.append(request.tokens)
    assert texts[0] == texts[1] and len(set(texts[0])) > 4


def test_resume_with_a_pending_token_emits_nothing_and_goes_on():
    driver = engine()
    origin = consume(driver, prompt_of(70), 0, capture=ROW)
    again, plan = resume_plan(driver, origin, 70, 1, pending=origin.tokens[0])
    driver._note([again], driver.submit(plan))
    assert again.tokens == [] and again.records[-1].generated == 0
    finish(driver, again)
    assert again.tokens == plain_text(SCRIPT, prompt_of(70), 61)[1:]


def test_resume_of_a_slot_that_was_not_restored_is_refused():
    driver = engine()
    origin = consume(driver, prompt_of(70), 0, capture=ROW)
    _, plan = resume_plan(driver, origin, 70, 1)
    with pytest.raises(ContractViolation, match="starts at 70"):
        driver.submit(msgspec.structs.replace(plan, restores=()))

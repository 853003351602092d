"""Plans that break an invariant are refused by name and change nothing."""

import msgspec
import numpy as np
import pytest
import torch

from flare_ray.contracts.plan import LanePlan, PageGrant, PrefillLane, RoundPlan, SlotInit
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.errors import ContractViolation
from tests.round.test_transitions import everything, same
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

SCRIPT = Script(vocab_size=16, order=1, seed=3)
INIT = SlotInit(2, 50, 9, 1, 8, 1.0, 0, 1.0, 0.0, ())
GRANT = PageGrant(2, 0, (30, 31))


def ready():
    """A driver with one request that decodes in slot 0 and one whose prompt is filling in 1."""
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=4, prefill_tokens=32)))
    (running,) = driver.prefill([driver.open((1, 2, 3), 0, budget=100)])
    filling, init, grant = driver.open(tuple(range(12)), 1, budget=100)
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    chunk = PrefillLane(1, filling.epoch, 0, (0, 1, 2, 3), False)
    driver.submit(RoundPlan(next(driver.round_ids), shape, (init,), (grant,), (), (chunk,), 1))
    return driver, running, filling


def round_of(driver, *lanes, **fields) -> RoundPlan:
    shape = driver.shape(GraphKind.SPECULATIVE, max(len(lanes), 1), 4, True)
    plan = RoundPlan(next(driver.round_ids), shape, lanes=lanes, context_pages=2)
    return msgspec.structs.replace(plan, **fields)


def chunk_of(driver, lane, **fields) -> RoundPlan:
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    plan = RoundPlan(next(driver.round_ids), shape, prefill=(lane,), context_pages=2)
    return msgspec.structs.replace(plan, **fields)


def lane(request, **fields) -> LanePlan:
    return msgspec.structs.replace(LanePlan(request.slot, request.epoch, 3), **fields)


BROKEN_ROUNDS = {
    "unknown slot": (lambda r, f: {"lanes": (lane(r, slot=7),)}, "does not exist"),
    "null slot": (lambda r, f: {"lanes": (lane(r, slot=4),)}, "does not exist"),
    "ceiling": (lambda r, f: {"lanes": (lane(r, ceiling=4),)}, "ceiling 4"),
    "negative ceiling": (lambda r, f: {"lanes": (lane(r, ceiling=-1),)}, "ceiling -1"),
    "two lanes": (lambda r, f: {"lanes": (lane(r), lane(r))}, "two lanes|holds 1..1"),
    "no lane": (lambda r, f: {"lanes": ()}, "0 lanes"),
    "prompt unfinished": (lambda r, f: {"lanes": (lane(f),)}, "before its prompt"),
    "copies": (lambda r, f: {"lanes": (lane(r, copy_tokens=(1,) * 4),)}, "copy tokens"),
    "copy sources": (lambda r, f: {"lanes": (lane(r, copy_tokens=(1,)),)}, "sources"),
    "copy id": (
        lambda r, f: {"lanes": (lane(r, copy_tokens=(16,), copy_sources=(1,)),)},
        "vocabulary",
    ),
    "mask rows": (lambda r, f: {"lanes": (lane(r, mask_row=0),)}, "mask rows"),
    "other kind": (
        lambda r, f: {"prefill": (PrefillLane(1, f.epoch, 4, (1,), False),)},
        "other kind",
    ),
    "round id": (lambda r, f: {"round_id": 1}, "must rise"),
    "grant beyond the pool": (lambda r, f: {"grants": (PageGrant(0, 0, (999,)),)}, "outside"),
    "grant of the null page": (lambda r, f: {"grants": (PageGrant(0, 0, (0,)),)}, "outside"),
    "grant with a hole": (lambda r, f: {"grants": (PageGrant(0, 9, (3,)),)}, "hole"),
    "grant past the table": (
        lambda r, f: {"grants": (PageGrant(0, 0, tuple(range(1, 30))),)},
        "the table holds",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_ROUNDS)
def test_broken_round_is_refused_and_changes_nothing(fault):
    driver, running, filling = ready()
    change, message = BROKEN_ROUNDS[fault]
    rank = driver.ranks[0]
    before = everything(rank)
    fields = {"lanes": (lane(running),), **change(running, filling)}
    plan = round_of(driver, *fields.pop("lanes"), **fields)
    with pytest.raises(ContractViolation, match=message):
        rank.execute(plan)
    assert same(before, everything(rank))
    driver.round([running], 4)


BROKEN_CHUNKS = {
    "empty": ({"tokens": ()}, "0 tokens"),
    "too long": ({"tokens": (1,) * 33}, "33 tokens"),
    "unknown token": ({"tokens": (16,)}, "vocabulary"),
    "wrong start": ({"start": 3}, "starts at 3"),
    "pending too early": ({"pending": 3}, "pending 3"),
    "mask without sampling": ({"mask_row": 0}, "mask"),
}


@pytest.mark.parametrize("fault", BROKEN_CHUNKS)
def test_broken_chunk_is_refused(fault):
    driver, _, filling = ready()
    fields, message = BROKEN_CHUNKS[fault]
    good = PrefillLane(1, filling.epoch, 4, (1, 2), False)
    with pytest.raises(ContractViolation, match=message):
        driver.submit(chunk_of(driver, msgspec.structs.replace(good, **fields)))
    driver.submit(chunk_of(driver, good))


BROKEN_INITS = {
    "slot": ({"slot": 4}, "does not exist"),
    "epoch": ({"slot": 0, "epoch": 1}, "raise it"),
    "budget": ({"budget": 0}, "budget 0"),
    "temperature": ({"temperature": 0.0}, "temperature"),
    "top_k": ({"top_k": 17}, "top_k 17"),
    "top_p": ({"top_p": 0.0}, "top_p"),
    "min_p": ({"min_p": 1.0}, "min_p"),
    "eos count": ({"eos_ids": (3,) * 17}, "17 EOS"),
    "eos id": ({"eos_ids": (16,)}, "EOS"),
}


@pytest.mark.parametrize("fault", BROKEN_INITS)
def test_broken_hand_over_is_refused(fault):
    driver, running, _ = ready()
    fields, message = BROKEN_INITS[fault]
    plan = round_of(driver, lane(running), inits=(msgspec.structs.replace(INIT, **fields),))
    with pytest.raises(ContractViolation, match=message):
        driver.submit(plan)


def test_positions_without_a_page_are_refused():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    request, init, grant = driver.open((1,) * 60, 0, budget=100)
    driver.prefill([(request, init, PageGrant(0, 0, grant.page_ids[:1]))])
    with pytest.raises(ContractViolation, match="2 pages, 1 were granted"):
        driver.round([request], 8)


def test_context_bound_below_a_lanes_positions_is_refused():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open((1,) * 60, 0, budget=100)], chunk=60)
    shape = driver.shape(GraphKind.SPECULATIVE, 1, 8, True)
    plan = round_of(driver, lane(request, ceiling=7), shape=shape, context_pages=1)
    with pytest.raises(ContractViolation, match="context_pages is 1"):
        driver.submit(plan)


def test_shape_outside_the_catalog_is_refused():
    driver, running, _ = ready()
    shape = GraphShape(
        kind=GraphKind.SPECULATIVE,
        batch_capacity=3,
        token_capacity=4,
        draft_tokens=3,
        verify_width=4,
    )
    with pytest.raises(ContractViolation, match="was not prepared"):
        driver.submit(round_of(driver, lane(running), shape=shape))


@pytest.mark.parametrize(
    "masks",
    [np.zeros((4, 1), np.int64), np.zeros((4, 2), np.int32), np.zeros(4, np.int32)],
    ids=["dtype", "words", "rank"],
)
def test_mask_block_of_another_form_is_refused(masks):
    driver, running, _ = ready()
    with pytest.raises(ContractViolation, match="expected int32"):
        driver.submit(round_of(driver, lane(running, mask_row=0), mask_rows=4), masks)


def test_integrity_check_names_a_damaged_slot():
    driver, _, _ = ready()
    rank = driver.ranks[0]
    rank.check_integrity()
    with torch.inference_mode():
        rank.store.request.core[0, 7] = 9
    with pytest.raises(ContractViolation, match="slot 0: column 9"):
        rank.check_integrity()

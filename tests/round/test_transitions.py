"""Epochs, queued rounds, isolation of lanes, and the shape of the program itself (contract: T4, T6,
G4)."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flare_ray.contracts.plan import LanePlan, PageGrant, PrefillLane, RoundPlan
from flare_ray.contracts.record import Flag, Status
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.state.layout import Core, Phase
from flare_ray.errors import ContractViolation
from tests.round.test_acceptance import PROMPT, greedy_script, plain_text
from tests.support.plain_rounds import plain_rounds as plain_rounds
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, scripted_rank
from tests.support.scripted.target import ScriptedTarget


def everything(rank) -> list[torch.Tensor]:
    """Copies of all persistent state, null slot and null page excepted."""
    store = rank.store
    request = store.request
    pages = ("token_pages", "pair_pages")
    groups = [t[1:] if name in pages else t[:-1] for name, t in store.groups.items()]
    logits = [getattr(request.logits, name) for name in request.logits.__slots__]
    tensors = (*groups, request.core, request.page_table, request.tail[:-1], *logits)
    return [t.clone() for t in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("width", [1, 4, 8])
def test_stale_epoch_changes_nothing(width):
    rank = scripted_rank(greedy_script(3))
    driver = Driver(rank)
    (old,) = driver.prefill([driver.open(PROMPT, 1, budget=40)])
    driver.round([old], 4)
    (new,) = driver.prefill([driver.open((7, 8, 9), 1, budget=40)])
    before = everything(rank)
    (record,) = driver.round([old], width)
    assert record.status == Status.IDLE
    assert (record.epoch, record.uid, record.emitted) == (old.epoch, 0, 0)
    assert same(before, everything(rank))
    while not new.ended:
        driver.round([new, old], width)
    assert new.tokens == plain_text(greedy_script(3), (7, 8, 9))


def test_stale_prefill_chunk_changes_nothing():
    rank = scripted_rank(greedy_script(3))
    driver = Driver(rank)
    (old,) = driver.prefill([driver.open(PROMPT, 0, budget=40)])
    opened = driver.open((7, 8, 9, 10), 0, budget=40)
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    new, init, grant = opened
    first = PrefillLane(0, new.epoch, 0, (7, 8), False)
    driver.submit(RoundPlan(50, shape, (init,), (grant,), (), (first,), 1))
    before = everything(rank)
    late = PrefillLane(0, old.epoch, 2, (1, 1), True)
    (record,) = driver.submit(RoundPlan(51, shape, prefill=(late,), context_pages=1))
    assert record.status == Status.IDLE
    assert same(before, everything(rank))
    last = PrefillLane(0, new.epoch, 2, (9, 10), True)
    (record,) = driver.submit(RoundPlan(52, shape, prefill=(last,), context_pages=1))
    assert record.flags == Flag.PREFILL | Flag.FIRST_TOKEN


@pytest.mark.parametrize("width", [1, 2, 8])
def test_queued_round_after_the_end_contributes_nothing(width):
    script = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=7, eos_ids=(6,))
    rank = scripted_rank(script)
    driver = Driver(rank)
    requests = driver.prefill([driver.open(PROMPT, s, budget=b) for s, b in ((0, 40), (1, 3))])
    while not requests[1].ended:
        driver.round(requests, width)
    ended = everything(rank)
    (record,) = driver.round([requests[1]], width)
    assert record.status == Status.IDLE
    assert record.tokens == ()
    assert same(ended, everything(rank))


@pytest.mark.parametrize("live", [True, False])
def test_round_runs_the_target_only_while_a_lane_is_live(live, plain_rounds, monkeypatch):
    script = Script(vocab_size=16, order=2, seed=3, eos_ids=(6,))
    rank = scripted_rank(script)
    driver = Driver(rank)
    requests = driver.prefill([driver.open(PROMPT, s, budget=b) for s, b in ((0, 40), (1, 3))])
    while not requests[1].ended:
        driver.round(requests, 2)
    passes = []
    forward = ScriptedTarget.forward
    monkeypatch.setattr(ScriptedTarget, "forward", lambda *a: passes.append(1) or forward(*a))
    before = next(driver.round_ids)
    records = driver.round(requests if live else [requests[1]], 2)
    assert len(passes) == live
    assert records[-1].status == Status.IDLE
    assert (records[-1].epoch, records[-1].round_id) == (requests[1].epoch, before + 1)


def test_neighbours_do_not_change_a_lanes_text():
    script = Script(vocab_size=16, order=2, seed=8)
    sampling = Sampling(temperature=1.0, top_k=0, seed=77)
    alone = Driver(scripted_rank(script)).generate(
        PROMPT, width=5, slot=0, budget=50, sampling=sampling
    )
    driver = Driver(scripted_rank(script))
    others = [
        driver.open(PROMPT[: s + 1], s, budget=50, sampling=Sampling(1.3, 0, seed=s))
        for s in range(3)
    ]
    mine = driver.open(PROMPT, 3, budget=50, sampling=sampling)
    requests = driver.prefill([*others, mine])
    while not requests[3].ended:
        driver.round([requests[3], *[r for r in requests[:3] if not r.ended]], 5)
    assert requests[3].tokens == alone.tokens


FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "is_nonzero")


class NoReadback(TorchDispatchMode):
    """Raises where a program would wait for the device or let data decide a shape."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        boolean = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)
        if name in FORBIDDEN or boolean:
            raise AssertionError(f"{func} reads data back")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [1, 2, 8])
def test_round_reads_nothing_back_from_the_device(width):
    driver = ready_driver()
    program = prepared_program(driver, driver.requests, width)
    with torch.inference_mode(), NoReadback():
        program.replay()


def test_prefill_reads_nothing_back_from_the_device():
    rank = scripted_rank(greedy_script(3))
    driver = Driver(rank)
    request, init, grant = driver.open(PROMPT, 0)
    shape = driver.shape(GraphKind.PREFILL, 1, 0, True)
    lane = PrefillLane(0, request.epoch, 0, PROMPT, True)
    plan = RoundPlan(1, shape, (init,), (grant,), (), (lane,), 1)
    program = rank.backend.program(shape)
    with torch.inference_mode():
        rank.store.init_slot(init)
        rank.store.grant(grant)
        program.prepare(plan, None, rank._bounds(plan))
        with NoReadback():
            program.replay()
    assert int(rank.store.request.core[0, Core.PHASE]) == Phase.READY


def test_read_back_detector_catches_offenders():
    x = torch.arange(4.0)
    for offender in (lambda: x[0].item(), lambda: x[x > 1], lambda: bool(x[1] > 0)):
        with pytest.raises(AssertionError), NoReadback():
            offender()


def ready_driver() -> Driver:
    script = greedy_script(3)
    driver = Driver(scripted_rank(script))
    sampling = Sampling(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=5)
    opened = [driver.open(PROMPT, s, budget=300, sampling=sampling) for s in range(3)]
    driver.requests = driver.prefill(opened)
    return driver


def prepared_program(driver: Driver, requests, width: int):
    rank = driver.ranks[0]
    shape = driver.shape(GraphKind.SPECULATIVE, len(requests), width, True)
    lanes = tuple(
        LanePlan(r.slot, r.epoch, width - 1, (3,) * (width > 1), (1,) * (width > 1))
        for r in requests
    )
    plan = RoundPlan(10_000, shape, lanes=lanes, context_pages=4)
    program = rank.backend.program(shape)
    program.prepare(plan, None, rank._bounds(plan))
    return program


@pytest.fixture
def forgotten_heap():
    """Collections and counts look at what the test itself makes, not at a whole run's objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensors() -> int:
    gc.collect()
    return sum(type(o) is torch.Tensor for o in gc.get_objects())


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_rounds_leave_no_tensor_behind(recorded, request, forgotten_heap):
    if not recorded:
        request.getfixturevalue("plain_rounds")
    driver = ready_driver()
    for width in (1, 4, 8) * 2:  # on CPU the second round of a kind is recorded, and kept
        driver.round(driver.requests, width)
    before = live_tensors()
    kept = torch.zeros(1)
    assert live_tensors() == before + 1  # the count would notice one tensor
    del kept
    for width in (1, 4, 8, 1, 4, 8):
        driver.round(driver.requests, width)
    assert live_tensors() <= before


@pytest.mark.parametrize("speculation", [True, False])
def test_poisoned_scratch_changes_nothing(speculation):
    script = Script(vocab_size=16, order=2, seed=8)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=0.9, seed=4)
    texts = []
    for poison in (False, True):
        rank = scripted_rank(script)
        driver = Driver(rank)
        opened = [driver.open(PROMPT, s, budget=40, sampling=sampling) for s in range(3)]
        if poison:
            rank.backend.arena.poison()
        requests = driver.prefill(opened, speculation=speculation)
        while alive := [r for r in requests if not r.ended]:
            if poison:
                rank.backend.arena.poison()
            driver.round(alive, 6 if speculation else 1, speculation=speculation)
        texts.append([r.tokens for r in requests])
    assert texts[0] == texts[1]


def test_families_alternate_between_requests_without_touching_each_other():
    script = greedy_script(4)
    driver = Driver(scripted_rank(script))
    (a,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    (b,) = driver.prefill([driver.open((9, 9), 1, budget=30)], speculation=False)
    while not (a.ended and b.ended):
        if not a.ended:
            driver.round([a], 6)
        if not b.ended:
            driver.round([b], 1, speculation=False)
    assert a.tokens == plain_text(script, budget=30)
    assert b.tokens == plain_text(script, (9, 9), budget=30)


def test_request_cannot_change_its_family():
    driver = Driver(scripted_rank(greedy_script(4)))
    (request,) = driver.prefill([driver.open(PROMPT, 0)], speculation=False)
    with pytest.raises(ContractViolation, match="family"):
        driver.round([request], 4)


def test_pages_granted_round_by_round_serve_as_well_as_all_at_once():
    script = greedy_script(6)
    rank = scripted_rank(script)
    driver = Driver(rank)
    request, init, grant = driver.open(PROMPT * 10, 0, budget=150)
    first = PageGrant(0, 0, grant.page_ids[:1])
    driver.prefill([(request, init, first)])
    granted = 1
    while not request.ended:
        consumed = request.records[-1].consumed
        needed = (consumed + 7) // 64 + 1
        grants = ()
        if granted < needed <= len(grant.page_ids):
            grants = (PageGrant(0, granted, grant.page_ids[granted:needed]),)
            granted = needed
        plan = RoundPlan(
            next(driver.round_ids),
            driver.shape(GraphKind.SPECULATIVE, 1, 8, True),
            grants=grants,
            lanes=(LanePlan(0, request.epoch, 7),),
            context_pages=granted,
        )
        driver._note([request], driver.submit(plan))
    assert request.tokens == plain_text(script, PROMPT * 10, 150)

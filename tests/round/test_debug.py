"""Debugging aids of a rank: freed memory is overwritten, damage is found, and neither needs luck
(contract: M7, T6)."""

import msgspec
import pytest
import torch

from flare_ray.contracts.plan import FreedMemory
from flare_ray.device.state.debug import POISON
from flare_ray.device.state.layout import Core
from flare_ray.errors import ContractViolation
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

SCRIPT = Script(vocab_size=16, order=2, seed=5, spread=2.0, draft_noise=0.3)
PROMPT = tuple(range(3, 16)) * 6


def running() -> Driver:
    """One request that decodes in slot 0, another one that has ended in slot 1."""
    driver = Driver(scripted_rank(SCRIPT, Setup(snapshot_rows=2)))
    driver.generate(PROMPT[:9], width=4, slot=1, budget=8)
    (driver.live,) = driver.prefill([driver.open(PROMPT, 0, budget=40)])
    driver.round([driver.live], 4)
    driver.ranks[0].check_integrity()
    return driver


def next_round(driver: Driver, freed: FreedMemory) -> None:
    submit = driver.submit
    driver.submit = lambda plan, masks=None: submit(msgspec.structs.replace(plan, freed=freed))
    driver.round([driver.live], 4)
    driver.submit = submit


def is_overwritten(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(torch.isnan(tensor).all())
    return bool((tensor == POISON).all())


def test_freed_pages_rows_and_slots_are_overwritten_and_nothing_else_is():
    driver = running()
    store = driver.ranks[0].store
    free = next(p for p in range(1, driver.manifest.num_pages) if p not in driver.live.pages)
    next_round(driver, FreedMemory((free,), (1,), (1,)))
    for group in store.spec_groups:
        tensor = store.groups[group.name]
        kept = driver.live.pages[0] if group.kind == "page" else 0
        gone = free if group.kind == "page" else 1
        assert is_overwritten(tensor[gone]), group.name
        assert not is_overwritten(tensor[kept]), group.name
        if group.kind != "page":
            assert is_overwritten(store.snapshots.rows[group.name][1]), group.name
            assert not is_overwritten(store.snapshots.rows[group.name][0]), group.name
            assert is_overwritten(store.publication.rows[group.name][1]), group.name
    assert is_overwritten(store.request.logits.counts[1])


def test_overwritten_memory_changes_no_text():
    driver = running()
    alone = Driver(scripted_rank(SCRIPT)).generate(PROMPT, width=4, budget=40)
    free = tuple(p for p in range(1, driver.manifest.num_pages) if p not in driver.live.pages)
    while not driver.live.ended:
        next_round(driver, FreedMemory(free, (0, 1), (1, 2, 3)))
    assert driver.live.tokens == alone.tokens
    reused = driver.generate(PROMPT, width=4, slot=1, budget=40)
    assert reused.tokens == alone.tokens


def test_page_that_is_overwritten_too_early_is_seen():
    """Negative control: the text hangs on the pages."""
    driver = running()
    alone = Driver(scripted_rank(SCRIPT)).generate(PROMPT, width=4, budget=40)
    next_round(driver, FreedMemory(driver.live.pages[:1]))
    while not driver.live.ended:
        driver.round([driver.live], 4)
    assert driver.live.tokens != alone.tokens


DAMAGES = {
    "epoch": lambda request: request.core[0, Core.EPOCH].add_(1),
    "consumed": lambda request: (
        request.core[0, Core.CONSUMED].add_(1),
        request.core[0, Core.DRAFT_POSITION].add_(1),
    ),
    "budget": lambda request: request.core[0, Core.BUDGET].add_(1),
    "page lost": lambda request: request.page_table[0, 0].zero_(),
    "page twice": lambda request: request.page_table[0, 1].copy_(request.page_table[0, 0]),
    "page outside": lambda request: request.page_table[0, 1].fill_(10**6),
    "null slot": lambda request: request.core[-1, Core.CONSUMED].fill_(3),
    "phase": lambda request: request.core[0, Core.PHASE].fill_(9),
    "pending": lambda request: request.core[0, Core.PENDING].fill_(-1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_of_a_rank_finds(damage):
    driver = running()
    with torch.inference_mode():
        DAMAGES[damage](driver.ranks[0].store.request)
    with pytest.raises(ContractViolation, match="damaged"):
        driver.ranks[0].check_integrity()


def test_damage_stops_the_rank_after_its_round_in_debug_mode():
    driver = running()
    with torch.inference_mode():
        driver.ranks[0].store.request.page_table[0, 1] = driver.live.pages[0]
    driver.ranks[0]._ledger.view(0).pages = len(driver.live.pages)
    with pytest.raises(ContractViolation, match="damaged"):
        next_round(driver, FreedMemory())

"""Captured programs against the same functions called eagerly, on a device (contract: G4, G6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flare_ray.contracts.shapes import PROMPT_KINDS
from flare_ray.device.graphs.variants import count_graphs
from tests.gpu.captured import WIDTHS, rank_of
from tests.recipes.test_prefix_reuse import RECIPES
from tests.support.mixed_rounds import GREEDY, PLAIN, SPECIAL, play
from tests.support.scripted.harness import Driver

pytestmark = pytest.mark.gpu

FOUR = ((PLAIN, SPECIAL, GREEDY, PLAIN), (GREEDY,) * 4)
SETTINGS = {"speculation": {"draft_tokens": 7}, "debug_checks": True}
BLOCK = "deepseek-v4.1-flash"
"""Drafts a whole block: prepared widths are one and eight."""


def widths_of(driver: Driver) -> tuple[int, ...]:
    prepared = {s.verify_width for s in driver.manifest.shapes if s.kind not in PROMPT_KINDS}
    return tuple(width for width in WIDTHS if width in prepared)


@pytest.fixture(scope="module", params=sorted(RECIPES))
def ranks(request, tmp_path_factory):
    """(eager, captured) of one recipe."""
    folder: Path = RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))
    made = [rank_of(folder, eager=eager, **SETTINGS) for eager in (True, False)]
    yield made
    for rank in made:
        rank.close()


def records(driver: Driver) -> list[tuple[int, ...]]:
    return [reply.rows for (reply,) in driver.replies]


def test_captured_programs_give_the_records_of_eager_ones(ranks):
    eager, captured = (Driver(rank) for rank in ranks)
    assert captured.manifest.graphs == count_graphs(captured.manifest.shapes)
    for driver in (eager, captured):
        play(driver, widths_of(driver), FOUR)
    differing = [
        plan.shape
        for (plan, _), ours, theirs in zip(
            captured.log, records(captured), records(eager), strict=True
        )
        if ours != theirs
    ]
    assert not differing, differing[:4]


def test_replays_repeat_their_bits_whatever_lay_in_scratch(ranks):
    """The same plans in fresh slots, the second time over poisoned scratch."""
    rank = ranks[1]
    texts = []
    for poisoned in (False, True):
        driver = Driver(rank)
        driver.round_ids = iter(range(rank._ledger._last_round + 1, 1 << 30))
        driver._epochs = iter(range(1000 * (1 + poisoned), 1 << 30))
        submit = driver.submit

        def poison_and_submit(plan, masks=None, submit=submit, poisoned=poisoned):
            if poisoned:
                rank.backend.arena.poison()
            return submit(plan, masks)

        driver.submit = poison_and_submit
        play(driver, widths_of(driver), FOUR[:1])
        texts.append([r.tokens for r in driver_records(driver)])
    assert texts[0] == texts[1]


def driver_records(driver: Driver):
    from flare_ray.contracts.record import unpack_rows

    return [record for (reply,) in driver.replies for record in unpack_rows(reply.rows)]


def test_a_thousand_mixed_replays_allocate_nothing(ranks):
    """`debug_checks` compares the allocator's count around every replay; the pool stays besides."""
    rank = ranks[1]
    driver = Driver(rank)
    driver.round_ids = iter(range(rank._ledger._last_round + 1, 1 << 30))
    driver._epochs = iter(range(5000, 1 << 30))
    torch.cuda.synchronize()
    reserved, replays = torch.cuda.memory_reserved(), 0
    while replays < 1000:
        before = len(driver.log)
        play(driver, widths_of(driver), FOUR[:1])
        replays += len(driver.log) - before
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved


def test_pool_is_what_was_planned(ranks):
    planned, taken = ranks[1].manifest.budget.graph_pool_bytes, ranks[1].backend.pool_bytes
    print(f"graph pool: planned {planned / 2**20:.1f} MiB, taken {taken / 2**20:.1f} MiB")
    assert taken <= planned


def test_every_round_was_priced(ranks):
    assert all(cost > 0 for _, cost in ranks[1].manifest.prices)
    assert len(ranks[1].manifest.prices) == len(ranks[0].manifest.prices)

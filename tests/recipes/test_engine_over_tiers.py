"""Every recipe's requests under random arrivals, branches, cancels, preemptions, widths, accepted
counts and moves between tiers compute what they compute alone (contract: M4, M7, V).

Copies and files are as late as a rank could make them, host memory that holds nothing is poisoned,
files lose bits. Known faults of this kind in other engines: see `test_engine_under_pressure.py`.
"""

from __future__ import annotations

import pytest
import torch

from flare_ray.contracts.tiers import Tier
from flare_ray.device.state.snapshot_host import SnapshotArena
from tests.recipes.test_engine_under_pressure import EVERY_RECIPE, FULL, RECIPES, run
from tests.support.engine_machine import EngineMachine
from tests.support.tier_machine import TierMachine

QUICK = 2
LENGTH = 129
"""Of the prefix that is moved by hand: two pages and one token."""


@pytest.fixture(scope="module", params=EVERY_RECIPE)
def machine(request, tmp_path_factory) -> type[EngineMachine]:
    """A machine class over the recipe's engine, prepared once."""
    engine = RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))
    return type("Machine", (TierMachine,), {"engine": engine})


def test_random_use_over_tiers_computes_what_every_request_computes_alone(machine):
    run(machine, QUICK)


def moved_once(machine: type[TierMachine], tier: Tier, *, depth: int) -> TierMachine:
    """Drive a machine by hand: a prefix comes back from a tier while another request runs."""
    engine = machine()
    engine.start(depth=depth, pool=2, rows=2, seed=5)
    engine.change_width(3)
    engine.arrive(root=0, length=LENGTH, tail=0, budget=3, penalised=False, priority=0)
    engine.come_to_rest()
    engine.arrive(root=1, length=12, tail=0, budget=70, penalised=False, priority=0)
    engine.run(2)
    engine.forget("device" if tier is Tier.HOST else "device host")
    engine.run(1)
    engine.arrive(root=0, length=LENGTH, tail=2, budget=70, penalised=True, priority=0)
    engine.run(5)  # beside the move, which has not happened yet
    assert engine.controller.stats().waiting == 1
    engine.teardown()
    return engine


@pytest.mark.parametrize(
    ("tier", "depth"),
    [
        (Tier.HOST, 1),
        (Tier.DISK, 2),
        pytest.param(Tier.HOST, 2, marks=pytest.mark.slow),
        pytest.param(Tier.DISK, 1, marks=pytest.mark.slow),
    ],
)
def test_prefix_comes_back_beside_rounds_with_the_logits_of_a_cold_run(machine, tier, depth):
    done = moved_once(machine, tier, depth=depth)
    assert done.restored(tier) == LENGTH
    assert done.compared > 20 and done.compared_drafts > 20


def test_comparison_catches_a_copy_that_is_off_by_a_percent(machine, monkeypatch):
    """Negative control."""
    load = SnapshotArena.load

    def damaged(self: SnapshotArena, order) -> int:
        moved = load(self, order)
        for name, rows in self._store.snapshots.rows.items():
            if torch.is_floating_point(rows):
                self._store.snapshots.rows[name][order.row].mul_(1.01)
        return moved

    monkeypatch.setattr(SnapshotArena, "load", damaged)
    with pytest.raises(AssertionError, match=r"is off by|differs"):
        moved_once(machine, Tier.HOST, depth=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_random_use_over_tiers_computes_what_every_request_computes_alone(machine):
    run(machine, FULL)

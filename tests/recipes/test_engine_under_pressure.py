"""Every recipe's requests under random arrivals, branches, cancels, preemptions, widths and
accepted counts compute what they compute alone: target and drafter, at both queue depths
(contract: M4, M7, V). Freed and never written memory is NaN throughout.

Known faults of this kind in other engines: vllm#53912 and #43559 (reuse with a drafter corrupts
recurrent models), tpu-inference#3358 and #3412 (another request's recurrent row after a hit),
vllm-project/vllm#14649 (H-19, draft history from approximate states).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from flare_ray.contracts.plan import SlotRestore
from flare_ray.device.state.store import StateStore
from tests.support import deepseek_tiny, glm_tiny, llama_tiny, qwen_tiny
from tests.support.engine_machine import Engine, EngineMachine
from tests.support.scripted.recipe import DOTTED
from tests.support.scripted_engine import scripted_checkpoint

QUICK = 3
FULL = 50
"""Examples of the default suite and of the slow one."""
STEPS = 25

SLOW_LENGTHS = (63, 65, 128)
LENGTHS = [
    pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_LENGTHS))
    for n in (1, 63, 64, 65, 127, 128, 129)
]

RECIPES: dict[str, Callable[[Path], Engine]] = {
    "scripted": lambda folder: Engine(Path(scripted_checkpoint(folder)), recipe=DOTTED),
    "glm-5.3-flash": lambda folder: Engine(glm_tiny.write_checkpoint(folder, "wide")),
    "glm-5.3-flash-pooled": lambda folder: Engine(glm_tiny.write_checkpoint(folder, "pooled")),
    "qwen3.8-flash": lambda folder: Engine(qwen_tiny.write_checkpoint(folder, "qwen-fused")),
    "llama": lambda folder: Engine(llama_tiny.write_checkpoint(folder, "llama-odd")),
    "deepseek-v4.1-flash": lambda folder: Engine(deepseek_tiny.write_checkpoint(folder, "sparse")),
    "deepseek-v4.1-flash-rounded": lambda folder: Engine(
        deepseek_tiny.write_checkpoint(folder, "rounded")
    ),
}


QUICK_RECIPES = ("scripted", "glm-5.3-flash")
"""The others run in the slow suite only."""
EVERY_RECIPE = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_RECIPES)) for name in RECIPES
]


@pytest.fixture(scope="module", params=EVERY_RECIPE)
def machine(request, tmp_path_factory) -> type[EngineMachine]:
    """A machine class over the recipe's engine, prepared once."""
    engine = RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))
    return type("Machine", (EngineMachine,), {"engine": engine})


def run(machine: type[EngineMachine], examples: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=quiet,
        ),
    )


def test_random_use_computes_what_every_request_computes_alone(machine):
    run(machine, QUICK)


@pytest.mark.parametrize("place", ["prompt", "first", "answer"])
@pytest.mark.parametrize("length", LENGTHS)
def test_preempted_request_goes_on_with_the_logits_of_a_cold_run(machine, length, place):
    """Beside another request, in every part of its life, at pages' and groups' boundaries."""
    done = preempted_once(machine, length, place, depth=1 + length % 2)
    assert done.compared > 20 and done.compared_drafts > 20
    resumed = [lane for plan in done.channel.plans for lane in plan.prefill if lane.pending >= 0]
    # a short prompt is consumed at once, and then it is past it
    assert len(resumed) == 1 or place == "prompt"


def preempted_once(machine, length, place, *, depth) -> EngineMachine:
    """Drive a machine by hand: one of two requests is preempted."""
    engine = machine()
    engine.start(depth=depth, pool=2, rows=2, seed=length)
    engine.change_width(3)
    engine.arrive(root=1, length=5, tail=0, budget=70, penalised=False, priority=0)
    engine.run(4)
    engine.arrive(root=0, length=length, tail=1, budget=22, penalised=True, priority=0)
    live = engine.controller._requests["r1"]
    least = {"prompt": -1, "first": 0, "answer": 9}[place]
    engine.run(1)
    while live.generated_tokens <= least:
        engine.run(1)
    engine.controller._admission.preempt(live)
    engine.teardown()
    return engine


def last_history(store: StateStore, restore: SlotRestore) -> list[Tensor]:
    """What the drafter keeps of the last restored token: the tail of its open pair, or a row of
    each of its windows."""
    tail = store.request.tail
    if tail is not None and store.spec.history == "pairs":
        return [tail[restore.slot]]
    rings = (g for g in store.spec_groups if (g.family, g.kind) == ("drafter", "ring"))
    return [store.groups[g.name][restore.slot, (restore.consumed - 1) % g.entries] for g in rings]


SABOTAGES = {
    "a restored row that is off by a percent": (
        "flare_ray.device.state.snapshots.SnapshotRows.restore",
        lambda original: (
            lambda self, row, *rest: (
                [rows[row].mul_(1.01) for rows in self.rows.values() if rows.is_floating_point()],
                original(self, row, *rest),
            )
        ),
    ),
    "counts that a restore loses": (
        "flare_ray.device.state.logits.LogitState.init_slot",
        lambda original: (
            lambda self, init: original(self, msgspec.structs.replace(init, output=b"", seen=b""))
        ),
    ),
    "a page that keeps what its last owner wrote": (
        "flare_ray.device.state.store.StateStore.restore",
        lambda original: (
            lambda self, restore, keeps_pairs: original(
                self, msgspec.structs.replace(restore, source_page=0), keeps_pairs=keeps_pairs
            )
        ),
    ),
    "a draft history whose last row is missing": (
        "flare_ray.device.state.store.StateStore.restore",
        lambda original: (
            lambda self, restore, keeps_pairs: (
                original(self, restore, keeps_pairs=keeps_pairs),
                [row.zero_() for row in last_history(self, restore)],
            )
        ),
    ),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_comparison_catches(machine, sabotage, monkeypatch):
    """Negative controls, on a request that is preempted behind a page boundary and restored."""
    groups = machine.engine._parts.spec.groups
    if "percent" in sabotage and all(group.kind == "page" for group in groups):
        pytest.skip("beside pages the recipe keeps a tail alone, which another control loses whole")
    preempted_once(machine, 127, "answer", depth=2)
    target, damaged = SABOTAGES[sabotage]
    monkeypatch.setattr(target, damaged(pkgutil.resolve_name(target)))
    with pytest.raises(AssertionError):
        preempted_once(machine, 127, "answer", depth=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_random_use_computes_what_every_request_computes_alone(machine):
    run(machine, FULL)

"""Packed rounds: forecasts decide which drafts are verified, never what is emitted (contract: C4,
G3)."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from flare_ray.config import EngineConfig
from flare_ray.contracts.plan import LanePlan, RoundPlan
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.executor import ModelParts, RankExecutor
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import _build, make_plan
from flare_ray.device.speculation.packing import assigned_prefixes
from flare_ray.errors import ContractViolation
from tests.support.deepseek_tiny import write_checkpoint
from tests.support.scripted.harness import Driver, Sampling

PROMPTS = ((5, 9, 12, 9, 7, 11), (20, 21, 22), tuple(range(30, 50)))
BUDGET = 24
GREEDY, REPRODUCIBLE = Sampling(), Sampling(1.0, 0, seed=3, coupled=True)
CAPACITY = 9
"""Rows of a packed round of up to four lanes: three lanes offer six drafts among them."""


class Forecasting:
    """The recipe's drafter with its forecasts replaced."""

    def __init__(self, drafter, told) -> None:
        self._drafter, self._told = drafter, told

    def absorb(self, rows, state):
        self._drafter.absorb(rows, state)

    def propose(self, start, state, sink):
        told = self._told

        class Sink:
            def forecast(self, depth, confidence):
                sink.forecast(depth, told(depth, confidence))

            def draw(self, depth, logits):
                return sink.draw(depth, logits)

        self._drafter.propose(start, state, Sink())


FORECASTS = {
    "own": lambda depth, confidence: confidence,
    "backwards": lambda depth, confidence: 1.0 - confidence,
    "certain": lambda depth, confidence: torch.ones_like(confidence),
    "hopeless": lambda depth, confidence: torch.zeros_like(confidence),
    "one lane": lambda depth, confidence: (torch.arange(len(confidence)) == 1).float(),
    "no number": lambda depth, confidence: torch.full_like(confidence, float("nan")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "sparse")


def packed_driver(folder, told) -> Driver:
    config = EngineConfig(
        checkpoint=str(folder),
        device="cpu",
        dtype="float32",
        concurrency=4,
        context_tokens=128,
        prefill_tokens=64,
    )
    plan = make_plan(config)
    wide = next(s for s in plan.manifest.shapes if s.verify_width == 8 and s.batch_capacity == 4)
    packed = msgspec.structs.replace(wide, packed_capacity=CAPACITY)
    manifest = msgspec.structs.replace(plan.manifest, shapes=(*plan.manifest.shapes, packed))
    with torch.inference_mode():
        parts = _build(plan, config, SingleGroup())
        parts = ModelParts(parts.spec, parts.target, Forecasting(parts.drafter, told))
        return Driver(RankExecutor(manifest, parts))


def packed_round(driver: Driver, requests, ceilings) -> tuple:
    shape = next(s for s in driver.manifest.shapes if s.packed_capacity)
    plan = RoundPlan(
        round_id=next(driver.round_ids),
        shape=shape,
        lanes=tuple(LanePlan(r.slot, r.epoch, c) for r, c in zip(requests, ceilings, strict=True)),
        context_pages=max(len(r.pages) for r in requests),
    )
    records = driver.submit(plan)
    driver._note(requests, records)
    return records


def generated(driver: Driver, sampling: Sampling, run) -> list[list[int]]:
    requests = driver.prefill(
        [driver.open(p, slot, budget=BUDGET, sampling=sampling) for slot, p in enumerate(PROMPTS)]
    )
    while live := [r for r in requests if not r.ended]:
        run(live)
    for request in requests:
        driver.close(request)
    return [request.tokens for request in requests]


@pytest.mark.parametrize(
    ("told", "sampling"),
    [
        ("own", GREEDY),
        ("backwards", REPRODUCIBLE),
        ("one lane", GREEDY),
        ("no number", GREEDY),
        pytest.param("own", REPRODUCIBLE, marks=pytest.mark.slow),
        pytest.param("certain", REPRODUCIBLE, marks=pytest.mark.slow),
        pytest.param("hopeless", GREEDY, marks=pytest.mark.slow),
    ],
)
def test_no_forecast_changes_the_text(folder, told, sampling):
    driver = packed_driver(folder, FORECASTS[told])
    plain = generated(driver, sampling, lambda live: driver.round(live, 1))
    offered: list[int] = []

    def packed(live):
        records = packed_round(driver, live, [7] * len(live))
        rows = sum(1 + record.offered for record in records)
        assert rows <= CAPACITY
        offered.extend(record.offered for record in records)

    assert generated(driver, sampling, packed) == plain
    assert sum(offered) > 0 or told in ("hopeless", "no number")


def test_ceilings_bound_what_forecasts_may_assign(folder):
    driver = packed_driver(folder, FORECASTS["certain"])
    requests = driver.prefill(
        [driver.open(p, slot, budget=BUDGET) for slot, p in enumerate(PROMPTS)]
    )
    records = packed_round(driver, requests, [1, 0, 3])
    assert [record.offered for record in records] == [1, 0, 3]
    records = packed_round(driver, requests, [7, 7, 7])
    assert sum(record.offered for record in records) == CAPACITY - len(PROMPTS)


def brute_force(survival, room, active, capacity):
    places = [
        (-float(survival[b, i]), b, i)
        for b, i in itertools.product(range(survival.shape[0]), range(survival.shape[1]))
        if active[b] and i < room[b]
    ]
    taken = sorted(places)[: capacity - int(active.sum())]
    return [sum(1 for _, b, _ in taken if b == lane) for lane in range(survival.shape[0])]


@pytest.mark.parametrize("seed", range(40))
def test_assignment_equals_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    lanes, depth = 5, 7
    # few distinct values, so that ties are common
    chances = torch.randint(0, 4, (lanes, depth), generator=generator) / 3
    room = torch.randint(0, depth + 1, (lanes,), generator=generator)
    active = torch.rand(lanes, generator=generator) > 0.2
    capacity = int(torch.randint(lanes + 1, lanes * (depth + 1), (1,), generator=generator))
    got = assigned_prefixes(list(chances.unbind(1)), room, active, capacity=capacity)
    assert got.tolist() == brute_force(chances.cumprod(1), room, active, capacity)


def test_a_drafter_without_forecasts_is_refused():
    with pytest.raises(ContractViolation, match="without forecasts"):
        assigned_prefixes([], torch.zeros(2), torch.ones(2, dtype=torch.bool), capacity=3)


def test_catalog_of_a_block_drafter_holds_two_widths(folder):
    driver = packed_driver(folder, FORECASTS["own"])
    rounds = [s for s in driver.manifest.shapes if s.kind is GraphKind.SPECULATIVE]
    assert {(s.draft_tokens, s.verify_width) for s in rounds} == {(0, 1), (7, 8)}

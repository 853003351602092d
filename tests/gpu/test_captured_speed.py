"""What capturing gains at one lane, printed as JSON (contract: C7; figures are for reading)."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from flare_ray.actors.core import EngineCore
from flare_ray.actors.inprocess import start_inprocess
from flare_ray.contracts.messages import Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.device.executor import RankExecutor
from tests.actors.test_core import Consumer
from tests.gpu.captured import config_of, rank_of
from tests.support.mixed_rounds import PLAIN
from tests.support.scripted.harness import Driver
from tests.support.served_glm import served_glm

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROUNDS = 30
SKIPPED = 5
WIDTHS = (1, 6)
CHECKPOINT = "FLARE_SPEED_CHECKPOINT"
"""Environment variable: a GLM checkpoint folder to time; the micro one otherwise."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    given = os.environ.get(CHECKPOINT)
    return Path(given) if given else served_glm(tmp_path_factory.mktemp("micro") / "glm")


def timed(driver: Driver, width: int) -> dict[str, float]:
    """Medians of a round of one lane, in microseconds: as the host sees it, and on the device."""
    (request,) = driver.prefill([driver.open(range(3, 43), 0, budget=420, sampling=PLAIN, eos=())])
    rank = driver.ranks[0]
    wall, device = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        driver.round([request], width)
        wall.append(time.perf_counter_ns() - started)
    program = rank.backend.program(driver.log[-1][0].shape)
    with torch.inference_mode():
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            program.replay()
            end.record()
            end.synchronize()
            device.append(start.elapsed_time(end) * 1e6)
    driver.close(request)
    return {
        "wall_us": statistics.median(wall[SKIPPED:]) / 1e3,
        "device_us": statistics.median(device[SKIPPED:]) / 1e3,
    }


def memory(rank: RankExecutor) -> dict[str, float]:
    """MiB: planned for the rank and for the graphs' pool, and what both took."""
    budget = rank.manifest.budget
    planned = sum(getattr(budget, name) for name in budget.__struct_fields__)
    free, total = torch.cuda.mem_get_info()
    return {
        "graphs": rank.manifest.graphs,
        "plan_mib": planned / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
        "device_mib": (total - free) / MIB,
        "pool_plan_mib": budget.graph_pool_bytes / MIB,
        "pool_mib": getattr(rank.backend, "pool_bytes", 0) / MIB,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_rounds_of_one_lane_are_faster_than_eager_ones(folder, dtype):
    fields = {"dtype": dtype, "debug_checks": False, "speculation": {"draft_tokens": 5}}
    figures: dict[str, dict] = {}
    for eager in (True, False):
        started = time.perf_counter()
        rank = rank_of(folder, eager=eager, **fields)
        kind = "eager" if eager else "captured"
        figures[kind] = {"start_s": time.perf_counter() - started, **memory(rank)}
        for width in WIDTHS:
            driver = Driver(rank)
            driver.round_ids = iter(range(rank._ledger._last_round + 1, 1 << 30))
            driver._epochs = iter(range(1000 * width, 1 << 30))
            figures[kind][f"w{width}"] = timed(driver, width)
        rank.close()
        del rank, driver
        torch.cuda.empty_cache()
    ratios = {
        f"graph_vs_eager_w{width}": figures["eager"][f"w{width}"]["wall_us"]
        / figures["captured"][f"w{width}"]["wall_us"]
        for width in WIDTHS
    }
    print(json.dumps({"dtype": dtype, **ratios, **figures}))
    assert min(ratios.values()) > 1.0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_whole_engine_of_one_lane_beside_replays(folder, queue_depth, width):
    """Rounds of a whole engine in this process against replays of the same program, by the clock
    of the device; prints, and bounds nothing but sanity."""
    settings = {"policy": "fixed", "fixed_width": width, "draft_tokens": max(WIDTHS) - 1}
    config = config_of(
        folder,
        dtype="bfloat16",
        queue_depth=queue_depth,
        debug_checks=False,
        speculation={**settings, "families": "speculative"},
        grammar={"enabled": False},
    )
    core = start_inprocess(config)
    try:
        seen = [generated(core, f"{queue_depth}-{width}-{turn}") for turn in range(3)]
    finally:
        core.shutdown(0.0)
    print(json.dumps({"queue_depth": queue_depth, "width": width, "round_us": min(seen)}))
    assert min(seen) > 0


def generated(core: EngineCore, name: str) -> float:
    """Microseconds a round of one request of 300 tokens."""
    sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=0.95, min_p=0.0, seed=7)
    consumer = Consumer()
    request = GenerationRequest(
        request_id=name,
        prompt_tokens=tuple(range(3, 43)),
        sampling=sampling,
        max_tokens=300,
        ignore_eos=True,
    )
    rounds, started = core.stats().rounds, time.perf_counter()
    core.submit(request, consumer)
    assert isinstance(consumer.end(), Finished)
    elapsed = time.perf_counter() - started
    return elapsed / (core.stats().rounds - rounds) * 1e6

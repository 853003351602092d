"""The benchmark at its smallest, on a checkpoint of a few thousand weights."""

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.support.results import metric_at, write_result
from benchmarks.workload import replay as replays
from benchmarks.workload.arms import ARMS, HISTORY, speculation_of
from benchmarks.workload.baselines import BaselineJob, measure_baselines
from benchmarks.workload.metrics import BOUNDS, workload_metrics
from benchmarks.workload.replay import Replayed, ReplayJob, measure_replay
from benchmarks.workload.run import OFFICIAL, SMALL, Size, run_arms
from flare_ray.errors import ConfigError
from flare_ray.workload.report import markdown
from flare_ray.workload.runner import blocks_of
from flare_ray.workload.source import load_workload
from flare_ray.workload.tables import tables_of
from tests.support.served_glm import served_glm

ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "concurrency": 2,
    "context_tokens": 512,
    "prefill_tokens": 64,
    "threads_per_rank": 1,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served_glm(tmp_path_factory.mktemp("micro") / "glm")


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def job_of(checkpoint, **fields) -> ReplayJob:
    prompts = [tuple(range(3, 20 + place)) for place in range(4)]
    chosen = {"prompts": prompts, "lanes": 2, "max_tokens": 12, "arm": "adaptive", **fields}
    return ReplayJob(checkpoint=checkpoint, engine=ENGINE, **chosen)


def test_arms_do_equal_work_and_give_every_metric(checkpoint, tmp_path):
    settings = msgspec.structs.replace(
        SMALL.settings, categories=("chat",), sessions=2, warm=1, chunk=1, max_tokens=10
    )
    arms = ("off", "fixed-0", "adaptive", HISTORY)
    size = Size(settings=settings, arms=arms, replay_requests=0, replay_tokens=0, engine=ENGINE)
    run = run_arms(size, checkpoint, tmp_path / "run", Console(quiet=True))
    replayed = Replayed(1.1, 1.0, 1.1, 1.0, 0.9, 10, 20, 400.0, {})
    metrics = workload_metrics(run, {"b1": replayed})
    assert metrics["unequal_requests"] == metrics["failed_requests"] == 0
    assert run.refused == {} and HISTORY in run.arm_names
    written = write_result("workload", metrics, BOUNDS, folder=tmp_path / "results")
    assert len(written.targets) == len(BOUNDS)
    text = markdown(tables_of(run))
    assert "Every arm completed the same tokens" in text


def test_replay_repeats_every_record(checkpoint):
    found = measure_replay(job_of(checkpoint, max_tokens=24))
    assert found.rounds > 2 and found.tokens == 2 * 24
    assert 0 < found.device_s < found.service_s and found.replay_s > 0
    assert 0 < found.gap_us < 1e6 * found.service_s
    assert any(name.startswith("speculative B=2") for name in found.by_graph)


def test_replay_notices_other_draws(checkpoint, monkeypatch):
    """Negative control."""
    record = replays._Recording.submit

    def submit(self, plan):
        record(self, plan)
        inits = tuple(msgspec.structs.replace(i, seed=i.seed + 1) for i in plan.inits)
        self.plans[-1] = msgspec.structs.replace(plan, inits=inits)

    monkeypatch.setattr(replays._Recording, "submit", submit)
    with pytest.raises(BenchmarkFailure, match="another record"):
        measure_replay(job_of(checkpoint, lanes=1))


def test_official_size_fits_the_frozen_workload():
    blocks = blocks_of(load_workload().items, OFFICIAL.settings)
    assert {block.category for block in blocks} == set(OFFICIAL.settings.categories)


def test_arms_are_the_contracts():
    assert ARMS[:2] == ("off", "fixed-0") and ARMS[-2:] == ("adaptive-copies", HISTORY)
    with pytest.raises(ConfigError, match="no arm"):
        speculation_of("fixed-9")


@pytest.mark.slow
def test_baselines_fill_every_table(checkpoint):
    job = BaselineJob(
        checkpoint=checkpoint,
        engine=ENGINE,
        capacities=(64,),
        lengths=(64, 130),
        decode_lanes=(1, 2),
        decode_tokens=8,
        tail=(192, 11),
        repeats=1,
    )
    found = measure_baselines(job)
    assert metric_at(found, "decode.adaptive.lanes_2.tokens") == 16
    positive = (
        *("decode.off.lanes_1.tokens_per_s", "prefill.rows_64.tokens_130.prompt_tokens_per_s"),
        *("tail.warm_s", "tail.cold_s", "start.off"),
    )
    assert all(metric_at(found, path) > 0 for path in positive)

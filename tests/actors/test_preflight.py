"""What fits a cluster and what is missing, as arithmetic over nodes; errors across processes."""

import pickle
import time

import msgspec
import pytest

from flare_ray.actors.directory import REMOVE_S, STALE_S, EngineDirectory, EngineReport
from flare_ray.actors.preflight import (
    NodeResources,
    candidate_nodes,
    checkpoint_problem,
    demo_hint,
    engine_bundles,
    placement_problem,
    total_of,
)
from flare_ray.config import DeploymentConfig, EngineConfig, EngineDeployment
from flare_ray.errors import Overloaded, RankFailure
from flare_ray.metrics.recorder import Snapshot


def make_config(*, ranks: int = 4, device: str = "cuda", **deployment) -> DeploymentConfig:
    return DeploymentConfig(
        model_name="model",
        engine=EngineConfig(
            checkpoint="nowhere", tensor_parallel_size=ranks, device=device, context_tokens=64
        ),
        engine_deployment=EngineDeployment(**deployment),
    )


def node(name: str, *, cpus: float, gpus: float = 0.0, free_gpus: float | None = None):
    total = {"CPU": cpus, "GPU": gpus}
    free = {"CPU": cpus, "GPU": gpus if free_gpus is None else free_gpus}
    return NodeResources(name, name, total, free)


def test_ray_59064_one_group_holds_every_rank_and_the_controller_beside_rank_zero():
    bundles = engine_bundles(make_config(ranks=2, cpus_per_rank=2.0))
    assert bundles == [{"CPU": 2.5, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert total_of(bundles) == {"CPU": 4.5, "GPU": 2.0}
    assert engine_bundles(make_config(ranks=1, device="cpu")) == [{"CPU": 1.5}]


@pytest.mark.parametrize(
    ("nodes", "replicas", "text"),
    [
        ([node("a", cpus=16, gpus=4)], 1, ""),
        ([node("a", cpus=16, gpus=8)], 2, ""),
        # Eight GPUs, but no node has four: STRICT_PACK would wait for ever.
        ([node(n, cpus=16, gpus=2) for n in "abcd"], 1, "too small"),
        ([node("a", cpus=4, gpus=8)], 1, "too small"),
        ([node("a", cpus=16)], 1, "too small"),
        ([node("a", cpus=16, gpus=4, free_gpus=3)], 1, "in use"),
        ([node("a", cpus=16, gpus=4)], 2, "too small"),
        ([], 1, "no node is alive"),
    ],
)
def test_engines_must_fit_whole_on_single_nodes(nodes, replicas, text):
    problem = placement_problem(make_config(replicas=replicas), nodes)
    assert bool(problem) == bool(text)
    assert text in problem


def test_problem_names_what_is_needed_and_what_each_node_has():
    problem = placement_problem(make_config(), [node("gpu-host", cpus=16, gpus=2)])
    assert "4.5 CPU, 4 GPU" in problem and "gpu-host has 16 CPU, 2 GPU" in problem


def test_checkpoint_is_looked_for_where_an_engine_could_run():
    small, large = node("small", cpus=16), node("large", cpus=16, gpus=8)
    assert candidate_nodes(make_config(), [small, large]) == [large]
    assert candidate_nodes(make_config(), [small]) == [small]


def test_checkpoint_problem_names_every_missing_file(tmp_path):
    config = make_config().engine.model_copy(update={"checkpoint": str(tmp_path)})
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        assert name[-11:] in checkpoint_problem(config)
        (tmp_path / name).touch()
    assert checkpoint_problem(config) == ""


def test_demo_hint_names_a_demo_file():
    assert "-demo.yaml" in demo_hint("anything")


@pytest.mark.parametrize(
    "error",
    [
        RankFailure("rank 1 died", rank=1, round_id=7),
        Overloaded("full", retry_after_s=2.0, status=503),
    ],
)
def test_errors_with_keyword_arguments_survive_another_process(error):
    error.add_note("details")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.ray
def test_stale_reports_are_ignored_and_old_ones_removed(cluster):
    directory = EngineDirectory("stale: test")
    now = time.time()
    fresh = EngineReport(
        engine_id="fresh",
        time_s=now,
        ready=True,
        running=0,
        waiting=0,
        free_pages=1,
        total_pages=1,
        metrics=Snapshot("engine", "fresh", ()),
    )
    for name, age_s in (("stale", STALE_S + 1), ("old", REMOVE_S + 1)):
        directory.report(msgspec.structs.replace(fresh, engine_id=name, time_s=now - age_s))
    directory.report(fresh)
    assert directory.reports() == [fresh]
    directory.sweep()
    left = {report.engine_id for report in directory._all_reports()}
    assert left == {"fresh", "stale"}
    assert EngineDirectory("another").reports() == []

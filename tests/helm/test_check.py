"""`flare-ray check` of rendered objects: configuration, fit, times that contradict each other."""

import copy
import subprocess
import sys

import pytest
import yaml

from flare_ray.cli.cluster_check import check_source
from flare_ray.errors import CapacityError, ConfigError
from tests.helm.rendering import (
    changed,
    objects,
    rayservice,
    read_values,
    values_files,
)

CHECK = (sys.executable, "-m", "flare_ray.cli.main", "check", "-")
LIMIT_S = 120


@pytest.fixture
def service():
    return copy.deepcopy(rayservice(read_values("glm-4gpu")))


def check(service, tmp_path):
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump(service))
    return check_source(path)


def serve_config(service, **changes):
    """The service with its Serve configuration's arguments changed."""
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    arguments = document["applications"][0]["args"]
    document["applications"][0]["args"] = changed(arguments, **changes)
    service["spec"]["serveConfigV2"] = yaml.safe_dump(document)
    return service


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_check_passes_what_the_chart_renders(path):
    text = yaml.safe_dump_all(objects(yaml.safe_load(path.read_text())))
    result = subprocess.run(CHECK, input=text, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "correct" in result.stdout
    assert "fit" in result.stdout


def test_check_of_nothing_says_what_to_pipe():
    result = subprocess.run(CHECK, input="", capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert "helm template" in result.stderr


def test_check_places_several_engines_and_groups(tmp_path):
    values = changed(read_values("glm-2gpu"), replicas=3, httpWorkers__replicas=2)
    text = check(rayservice(values), tmp_path)
    assert "3 engine(s) of 4.5 CPU, 2 GPU" in text
    assert "3 x 12 CPU, 2 GPU (engines), 2 x 4 CPU (http)" in text


def test_check_counts_the_nodes_an_autoscaler_may_add(tmp_path, service):
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    document["applications"][0]["deployments"][0]["num_replicas"] = 2
    service["spec"]["serveConfigV2"] = yaml.safe_dump(document)
    with pytest.raises(CapacityError, match="1 of 2 engines fit"):
        check(service, tmp_path)
    group["maxReplicas"] = 2
    assert "2 engine(s)" in check(service, tmp_path)


def test_check_refuses_ranks_that_no_single_node_holds(tmp_path, service):
    """Four GPUs in all, but two a node: STRICT_PACK would wait for ever."""
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["rayStartParams"]["num-gpus"] = "2"
    group["maxReplicas"] = 2
    with pytest.raises(CapacityError, match=r"0 of 1 engines fit.*8\.5 CPU, 4 GPU on one node"):
        check(service, tmp_path)


def test_check_refuses_http_replicas_without_cpus(tmp_path, service):
    with pytest.raises(CapacityError, match="7 of 9 HTTP replicas"):
        check(serve_config(service, ingress__max_replicas=9), tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine__contxt_tokens": 1}, "did you mean context_tokens"),
        ({"engine__tensor_parallel_size": 8}, "splits into 1, 2, 4 ranks"),
        ({"engine_deployment__graceful_shutdown_s": 600}, "rayClusterDeletionDelaySeconds"),
        ({"engine_deployment__graceful_shutdown_s": 340}, "terminationGracePeriodSeconds"),
    ],
)
def test_check_refuses_the_rendered_serve_config(tmp_path, service, change, said):
    with pytest.raises(ConfigError, match=said):
        check(serve_config(service, **change), tmp_path)


def test_check_refuses_a_head_that_takes_replicas(tmp_path, service):
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].pop("num-cpus")
    with pytest.raises(ConfigError, match="replicas run on the head"):
        check(service, tmp_path)


def test_check_refuses_flags_that_differ_between_head_and_workers(tmp_path, service):
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    container["env"] = [e for e in container["env"] if e["name"] != "RAY_SERVE_ENABLE_HA_PROXY"]
    with pytest.raises(ConfigError, match="RAY_SERVE_ENABLE_HA_PROXY must be the same"):
        check(service, tmp_path)


def test_check_refuses_a_service_without_serve_config(tmp_path, service):
    service["spec"].pop("serveConfigV2")
    with pytest.raises(ConfigError, match="serveConfigV2 is missing"):
        check(service, tmp_path)

"""`flare-ray check` of values and of rendered objects: configuration, fit, secrets, and times that
contradict each other."""

import copy
import re
import subprocess
import sys

import pytest
import yaml

from flare_ray.cli.cluster_check import check_source
from flare_ray.errors import CapacityError, ConfigError
from tests.helm.rendering import (
    CHART,
    RELEASE,
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


def write_values(values, tmp_path):
    path = tmp_path / "my-values.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def check_values(values, tmp_path, **options):
    return check_source(write_values(values, tmp_path), chart=CHART, **options)


def serve_config(service, **changes):
    """The service with its Serve configuration's arguments changed."""
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    arguments = document["applications"][0]["args"]
    document["applications"][0]["args"] = changed(arguments, **changes)
    service["spec"]["serveConfigV2"] = yaml.safe_dump(document)
    return service


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_check_passes_shipped_values(path):
    text = check_source(path)
    assert "correct" in text
    assert "fit" in text
    assert re.search(r"one rank: weights .* = [\d.]+ GiB a rank; [\d.]+ GiB usable", text)


def test_check_of_values_and_of_their_rendering_say_the_same(tmp_path):
    values = changed(read_values("glm-2gpu"), replicas=3, httpWorkers__replicas=2)
    rendered = check(rayservice(values), tmp_path)
    same = check_values(values, tmp_path).replace("RayService check", f"RayService {RELEASE}")
    assert same.splitlines()[1:] == rendered.splitlines()[1:]


def test_command_reads_what_helm_template_writes():
    text = yaml.safe_dump_all(objects(read_values("glm-4gpu")))
    result = subprocess.run(CHECK, input=text, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "standard input: RayService demo: correct" in result.stdout


def test_command_reads_values_and_names_of_secrets(tmp_path):
    path = write_values({"apiKeys": {"existingSecret": "team-keys"}}, tmp_path)
    command = [*CHECK[:-1], str(path), "--chart", str(CHART), "--secrets", "secret/a secret/b"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert "secret team-keys (apiKeys.existingSecret) does not exist" in result.stderr


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


REFUSED_VALUES = {
    # The schema: every key of the file, not the first alone.
    "typo": (
        {"repliacs": 2, "engine__contxt_tokens": 1, "engine__speculation": {"draft_token": 3}},
        [
            "repliacs: unknown key; did you mean replicas?",
            "engine.contxt_tokens: unknown key; did you mean context_tokens?",
            "engine.speculation.draft_token: unknown key; did you mean draft_tokens?",
        ],
    ),
    "type": ({"worker__gpus": "four"}, ["worker.gpus: got string, want integer"]),
    # Rules of the chart: the key, the sum, the knob.
    "bytes": (
        {"worker__gpuMemoryGiB": 40},
        ["weights 46.6 +", "69.5 GiB a rank, 38.0 GiB usable", "raise tensorParallelSize"],
    ),
    "GPUs": ({"worker__gpus": 2}, ["needs 4 GPUs on one node", "raise worker.gpus"]),
    "unnamed secret": (
        {"weights__fetch": {"enabled": True, "repository": "a/b", "private": True}},
        ["set weights.fetch.token.existingSecret"],
    ),
    "upgrade": ({"upgrade__deletionDelaySeconds": 60}, ["upgrade.deletionDelaySeconds is 60"]),
    # The rendered Serve configuration and cluster, which the chart cannot judge.
    "widths": (
        {"engine__speculation": {"widths": [2, 4]}},
        ["serveConfigV2", "engine.speculation: widths must increase, start at 1"],
    ),
    "flags": (
        {"httpWorkers": {"replicas": 1, "extraEnv": [{"name": "RAY_SERVE_X", "value": "1"}]}},
        ["worker group http: RAY_SERVE_X must be the same as on the head"],
    ),
}


@pytest.mark.parametrize("rule", REFUSED_VALUES)
def test_check_refuses_values(rule, tmp_path):
    changes, said = REFUSED_VALUES[rule]
    with pytest.raises(ConfigError) as refusal:
        check_values(changed(read_values("glm-4gpu"), **changes), tmp_path)
    assert [words for words in said if words not in str(refusal.value)] == []


EVERY_SECRET = {
    "apiKeys": {"existingSecret": "keys"},
    "auth": {"existingSecret": "ray"},
    "gcsFaultTolerance": {"redisAddress": "redis:6379", "existingSecret": "redis"},
    "image": {"pullSecrets": ["registry"]},
    "ingress": {"enabled": True, "host": "x.example", "tlsSecret": "tls"},
    "tests": {"apiKey": {"existingSecret": "probe"}},
    "weights": {
        "fetch": {"enabled": True, "repository": "a/b", "token": {"existingSecret": "hub"}}
    },
    "worker": {
        "extraEnv": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "own", "key": "a"}}},
            {
                "name": "B",
                "valueFrom": {"secretKeyRef": {"name": "w", "key": "b", "optional": True}},
            },
        ],
        "extraVolumes": [{"name": "certificates", "secret": {"secretName": "ca"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
    },
}
NEEDED = {
    "keys": "apiKeys.existingSecret",
    "ray": "auth.existingSecret",
    "redis": "gcsFaultTolerance.existingSecret",
    "registry": "image.pullSecrets[0]",
    "tls": "ingress.tlsSecret",
    "probe": "tests.apiKey.existingSecret",
    "hub": "weights.fetch.token.existingSecret",
    "own": "worker.extraEnv[0].valueFrom.secretKeyRef.name",
    "ca": "worker.extraVolumes[0].secret.secretName",
}


def test_check_says_when_no_key_is_asked_for(tmp_path):
    assert "no API keys" in check_values({}, tmp_path)
    assert "no API keys" not in check_values({"apiKeys": {"existingSecret": "keys"}}, tmp_path)


def test_check_lists_the_secrets_that_must_exist(tmp_path):
    told = check_values(EVERY_SECRET, tmp_path).split("secrets that must exist: ")[1]
    assert dict(re.findall(r"(\S+) \((\S+)\)", told)) == NEEDED
    assert "must exist" not in check_values({"apiKeys": {"file": "keys: []"}}, tmp_path)


@pytest.mark.parametrize("name", NEEDED)
def test_check_refuses_a_secret_that_does_not_exist(name, tmp_path):
    others = frozenset(NEEDED) - {name}
    with pytest.raises(ConfigError) as refusal:
        check_values(EVERY_SECRET, tmp_path, secrets=others)
    [line] = str(refusal.value).splitlines()[1:]
    assert line.startswith(f"secret {name} ({NEEDED[name]}) does not exist")


def test_check_of_rendered_objects_refuses_a_secret_that_does_not_exist(tmp_path):
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(objects(EVERY_SECRET)))
    with pytest.raises(ConfigError, match=r"secret tls \(Ingress demo\) does not exist"):
        check_source(path, secrets=frozenset(NEEDED) - {"tls"})


def test_check_of_values_without_a_chart_names_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_values({"replicas": 2}, tmp_path)
    with pytest.raises(ConfigError, match="--chart helm/flare-ray"):
        check_source(path)
    with pytest.raises(ConfigError, match="is no chart"):
        check_source(path, chart=tmp_path)


def test_check_of_values_without_helm_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "helm_python", None)
    with pytest.raises(ConfigError, match=r"flare-ray\[chart\].*helm template"):
        check_values({}, tmp_path)


def test_typo_in_a_deployment_file_is_not_taken_for_values(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("application: []\nhttp_options: {host: 127.0.0.1}\n")
    with pytest.raises(ConfigError, match="application: unknown key; did you mean applications"):
        check_source(path)

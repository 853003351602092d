"""What the chart refuses, one control a rule, and that the checks of other tests can fail."""

import copy

import pytest
import yaml

from flare_ray.cli.config_check import check_document
from flare_ray.errors import ConfigError
from tests.helm.rendering import (
    KUBERNETES_VERSIONS,
    changed,
    objects,
    of_kind,
    problems,
    rayservice,
    read_values,
    refusal,
)

FETCH = {"weights__fetch__enabled": True, "weights__fetch__repository": "a/b"}
REFUSED = {
    # Typos and types.
    "unknown value": ({"repliacs": 2}, "repliacs"),
    "unknown engine setting": ({"engine__contxt_tokens": 1}, "contxt_tokens"),
    "setting that the chart gives": ({"engine__device": "cpu"}, "device"),
    "upgrade type": ({"upgrade__type": "Rolling"}, "type"),
    # Fit.
    "too few GPUs for STRICT_PACK": ({"worker__gpus": 2}, "one engine needs 4 GPUs on one node"),
    "too few CPUs": ({"worker__cpus": 8}, "one engine needs 8.5 CPUs"),
    "no room for HTTP replicas": ({"httpReplicas__max_replicas": 9}, "CPUs for 7"),
    "one GPU": ({"tensorParallelSize": 1}, "weights 180.4 + tables 0.0 +"),
    "unquantised": ({"model__weightFormat": "bfloat16"}, "weights 150.9 +"),
    "small GPUs": ({"worker__gpuMemoryGiB": 40}, "GiB usable (40.0 less 5 % headroom)"),
    "pages": ({"engine__page_pool_tokens": 16777216}, "pages 204.0 +"),
    "split that the recipe lacks": ({"tensorParallelSize": 8, "worker__gpus": 8}, "1, 2, 4 ranks"),
    "unknown preset": ({"model__preset": "glm-6"}, "this chart has deepseek-v4.1-flash, glm-"),
    "preset of another device": ({"model__preset": "glm-demo"}, "sized for cpu"),
    "activations of another width": ({"engine__dtype": "float32"}, "is sized for bfloat16"),
    "unknown format": ({"model__weightFormat": "int3"}, "bfloat16, nvfp4"),
    "tables that the model lacks": ({"engine__tables": "host"}, "has no tables"),
    "plain experts kept packed": (
        {"model__weightFormat": "bfloat16", "worker__gpuMemoryGiB": 1000}
        | {"engine__expert_weights": "packed"},
        "weightFormat bfloat16 is not",
    ),
    "experts counted packed, held dequantised": (
        {"engine__expert_weights": "dequantised"},
        "set weightFormat bfloat16",
    ),
    "host tier beyond the pod": (
        {"engine__prefix_cache": {"host_bytes": 1 << 40}},
        "lock 4096.0 GiB of host memory",
    ),
    "snapshots below one": (
        {"engine__prefix_cache": {"device_bytes": 1000}},
        "one snapshot takes 36995072",
    ),
    "context beyond the model": ({"engine__context_tokens": 2097152}, "holds 1048576"),
    "shm": ({"worker__shm": "200Gi"}, "more than half"),
    "HTTP replicas' bounds": ({"httpReplicas__min_replicas": 5}, "max_replicas 4: change either"),
    "HTTP nodes without a whole CPU": (
        {"httpWorkers": {"replicas": 1, "cpus": 0.5}},
        "Ray counts whole CPUs",
    ),
    "shm of the head": ({"head__shm": "9Gi"}, "head.shm 9Gi is more than half"),
    "shm of HTTP nodes": ({"httpWorkers__shm": "5Gi"}, "httpWorkers.shm 5Gi"),
    "pool below one context": ({"engine__page_pool_tokens": 64}, "below context_tokens"),
    "pool beyond counting": ({"engine__page_pool_tokens": 10**18}, "no GPU holds"),
    "part of a GPU": ({"engineDeployment__gpus_per_rank": 0.25}, "takes one GPU"),
    "no GPU": ({"engineDeployment__gpus_per_rank": 0}, "takes one GPU"),
    "counts that YAML would round": ({"replicas": 10**6}, "/replicas"),
    "seconds beyond KubeRay's": ({"longestGenerationSeconds": 3 * 10**9}, "/longestGeneration"),
    "section without values": ({"worker": None}, "missing property 'worker'"),
    "settings without values": ({"engine": None}, "missing property 'engine'"),
    "count without value": ({"replicas": None}, "missing property 'replicas'"),
    "memory without value": ({"head__memory": None}, "missing property 'memory'"),
    # Weights and secrets.
    "volume over the system's": ({"weights__mountPath": "/dev/shm"}, "mountPath"),
    "volume that ends in a slash": ({"weights__mountPath": "/models/"}, "mountPath"),
    "secret that no object can be": ({"apiKeys__existingSecret": "a, b"}, "existingSecret"),
    "two sources of keys": (
        {"apiKeys__existingSecret": "a", "apiKeys__file": "keys: []"},
        "not both",
    ),
    "key for a service without": ({"tests__apiKey__existingSecret": "a"}, "asks for no keys"),
    "claim that is not named": ({"weights__source": "existingClaim"}, "set weights.existingClaim"),
    "claim that is not used": ({"weights__existingClaim": "x"}, "weights.source is claim"),
    "folder that is not named": ({"weights__source": "hostPath"}, "set weights.hostPath"),
    "folder that is not used": ({"weights__hostPath": "/x"}, "weights.source is claim"),
    "checkpoint outside the volume": ({"model__checkpoint": "/elsewhere"}, "lies outside"),
    "relative path in the image": ({"weights__source": "image"}, "absolute path"),
    "several nodes, one writer": (
        {"replicas": 2, "weights__claim__accessModes": ["ReadWriteOnce"]},
        "needs ReadWriteMany",
    ),
    "nothing to fetch": ({"weights__fetch__enabled": True}, "set weights.fetch.repository"),
    "fetch settings without fetch": ({"weights__fetch__private": True}, "do nothing unless"),
    "missing secret": ({**FETCH, "weights__fetch__private": True}, "needs a token"),
    "two tokens": (
        {**FETCH, "weights__fetch__token": {"existingSecret": "a", "value": "b"}},
        "not both",
    ),
    "fetch into the node's folder": (
        {**FETCH, "weights__source": "hostPath", "weights__hostPath": "/x"},
        "writes to a claim",
    ),
    "token secret without token mode": (
        {"auth__mode": "disabled", "auth__existingSecret": "x"},
        "auth.mode is disabled",
    ),
    "no service account": ({"serviceAccount__create": False}, "set serviceAccount.name"),
    "password without Redis": ({"gcsFaultTolerance__existingSecret": "x"}, "needs redisAddress"),
    # Upgrades.
    "old cluster deleted early": ({"upgrade__deletionDelaySeconds": 60}, "deleted under answers"),
    "incremental without autoscaler": (
        {"upgrade__type": "NewClusterWithIncrementalUpgrade"},
        "needs autoscaler.enabled",
    ),
    "incremental without gateway class": (
        {"upgrade__type": "NewClusterWithIncrementalUpgrade", "autoscaler__enabled": True},
        "gatewayClassName",
    ),
    "gateway class without incremental": (
        {"upgrade__incremental__gatewayClassName": "x"},
        "upgrade.type is NewCluster",
    ),
    "step above surge": (
        {
            "upgrade__type": "NewClusterWithIncrementalUpgrade",
            "autoscaler__enabled": True,
            "upgrade__incremental": {"gatewayClassName": "x", "maxSurgePercent": 10},
        },
        "exceeds maxSurgePercent",
    ),
    # Scaling.
    "nodes without autoscaler": ({"autoscaler__maxNodes": 3}, "need autoscaler.enabled"),
    "autoscaler below replicas": (
        {"autoscaler__enabled": True, "autoscaler__maxNodes": 1, "replicas": 2},
        "exceeds maxNodes",
    ),
    "bounds of engines": (
        {"engineDeployment__autoscaling": {"max_replicas": 2}, "replicas": 2},
        "max_replicas is 2, replicas 2",
    ),
    "engines without most": ({"engineDeployment__autoscaling": {}}, "max_replicas"),
    "more engines than nodes": (
        {
            "engineDeployment__autoscaling": {"max_replicas": 3},
            "autoscaler": {"enabled": True, "minNodes": 1, "maxNodes": 1},
        },
        "raise it",
    ),
    "autoscaler's bounds": (
        {"autoscaler": {"enabled": True, "minNodes": 3, "maxNodes": 2}},
        "exceeds maxNodes",
    ),
    "no room to scale": (
        {"autoscaler": {"enabled": True, "minNodes": 0, "maxNodes": 1}, "replicas": 2},
        "raise it",
    ),
    # Access.
    "ingress without TLS": ({"ingress__enabled": True, "ingress__host": "x"}, "plain text"),
    "ingress without host": ({"ingress__enabled": True}, "set ingress.host"),
    "two ways in": ({"ingress__enabled": True, "gateway__enabled": True}, "choose one"),
    "gateway without TLS": (
        {"gateway": {"enabled": True, "name": "public"}},
        "name the HTTPS listener",
    ),
    "Ray's port": ({"http__port": 8265}, "Ray's own"),
    "all nodes away": ({"podDisruptionBudget__maxUnavailable": 1}, "of 1 node(s)"),
    "model's name in quotes": ({"model__name": 'a"b'}, "/model/name"),
    "gateway without name": ({"gateway__enabled": True}, "set gateway.name"),
    "host in upper case": (
        {"ingress__enabled": True, "ingress__tlsSecret": "x", "ingress__host": "Models.example"},
        'ingress.host "Models.example" is not a DNS name',
    ),
    "address as a host of the gateway": (
        {"gateway": {"enabled": True, "name": "x", "sectionName": "x", "hostnames": ["https://x"]}},
        'gateway.hostnames "https://x" is not a DNS name',
    ),
    "certificate without ingress": ({"ingress__tlsSecret": "x"}, "unless ingress.enabled"),
    "hosts without gateway": ({"gateway__hostnames": ["x.example"]}, "unless gateway.enabled"),
    # Pods.
    "checkpoint that leads out": ({"model__checkpoint": "a/../../b"}, "without .."),
    "GPUs that are CPUs": ({"worker__gpuResource": "cpu"}, 'worker.gpuResource "cpu"'),
    "variable of the chart": (
        {"worker__extraEnv": [{"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "0"}]},
        'worker.extraEnv: name "RAY_SERVE_ENABLE_HA_PROXY" stands twice (the chart sets',
    ),
    "variable given twice": (
        {"httpWorkers__extraEnv": [{"name": "A", "value": "0"}, {"name": "A", "value": "1"}]},
        'httpWorkers.extraEnv: name "A" stands twice (both in this list)',
    ),
    "variable without a name": ({"head__extraEnv": [{"nmae": "A"}]}, "an entry has no name"),
    "volume of the chart": (
        {"worker__extraVolumes": [{"name": "shm", "emptyDir": {}}]},
        'worker.extraVolumes: name "shm" stands twice',
    ),
    "mount over the chart's": (
        {"worker__extraVolumeMounts": [{"name": "a", "mountPath": "/models"}]},
        'worker.extraVolumeMounts: mountPath "/models" stands twice',
    ),
}


MISFITS = {
    # Pairs of model and GPUs that are not shipped, with their sums.
    ("deepseek-4gpu", 1): ({"worker__gpus": 1}, "weights 293.9 + tables 0.0 +"),
    ("deepseek-4gpu", 2): ({"worker__gpus": 2}, "weights 148.6 + tables 0.0 +"),
    ("deepseek-8gpu", 2): ({}, "weights 148.6 + tables 94.4 +"),
    ("deepseek-8gpu", 8): ({}, "splits over 1, 2, 4 ranks"),
    ("qwen-1gpu", 1): ({"engine__tables": "device"}, "weights 74.1 + tables 95.4 +"),
    ("qwen-1gpu", 8): ({"worker__gpus": 8}, "splits over 1, 2, 4 ranks"),
    ("qwen-2gpu", 2): ({"model__weightFormat": "bfloat16"}, "weights 121.0 + tables 47.7 +"),
    ("glm-2gpu", 1): ({"worker__gpus": 1}, "weights 180.4 +"),
}
TABLES = {
    "too little host memory": ("deepseek-4gpu", {"worker__memory": "160Gi"}, "lock 188.8 GiB"),
    "tables and host tier": (
        "qwen-1gpu",
        {"engine__prefix_cache": {"host_bytes": 80 << 30}},
        "lock 175.4 GiB",
    ),
    "two engines' tables": ("deepseek-8gpu", {"engine__tables": "host"}, "lock 377.7 GiB"),
    "tables on disk": ("deepseek-4gpu", {"engine__tables": "disk"}, "needs device: cpu"),
    "tables on paper": ("deepseek-4gpu", {"engine__tables": "paper"}, "tables"),
    "experts in a place": ("deepseek-4gpu", {"engine__expert_weights": "host"}, "expert_weights"),
    "format of another model": ("deepseek-4gpu", {"model__weightFormat": "nvfp4"}, "has mxfp4"),
}


@pytest.mark.parametrize(("name", "ranks"), MISFITS)
def test_pairs_of_model_and_gpus_that_do_not_fit_are_refused_with_their_sum(name, ranks):
    changes, said = MISFITS[name, ranks]
    assert said in refusal(changed(read_values(name), tensorParallelSize=ranks, **changes))


@pytest.mark.parametrize("rule", TABLES)
def test_chart_refuses_for_tables(rule):
    name, changes, said = TABLES[rule]
    assert said in refusal(changed(read_values(name), **changes))


@pytest.mark.parametrize("rule", REFUSED)
def test_chart_refuses(rule):
    changes, said = REFUSED[rule]
    assert said in refusal(changed(read_values("glm-4gpu"), **changes))


@pytest.mark.parametrize("name", ["glm_demo", "9lives", "a" * 48])
def test_chart_refuses_a_name_that_kuberay_would(name):
    assert "fullnameOverride" in refusal(read_values("glm-4gpu"), name=name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker__gpus": 1}, "set worker.gpus to 0"),
        ({"engineDeployment__gpus_per_rank": 1}, "gpus_per_rank"),
        ({"worker__memory": "1Gi", "worker__shm": "512Mi"}, "does not fit"),
        (
            {"engine__prefix_cache": {"host_bytes": 1 << 40}, "engine__page_pool_tokens": 65536}
            | {"engine__concurrency": 4},
            "lower host_bytes",
        ),
    ],
)
def test_chart_refuses_for_cpu(changes, said):
    """The demo's pages take 0.1 GiB; 200 slots of 4,096 tokens do not fit one."""
    values = changed(read_values("cpu-demo"), engine__concurrency=200)
    assert said in refusal(changed(values, **changes))


# Negative controls of the closed schemas.


def broken(kind, damage):
    [item] = of_kind(objects(changed(read_values("glm-4gpu"), monitoring__podMonitor=True)), kind)
    item = copy.deepcopy(item)
    damage(item["spec"])
    return [text for version in KUBERNETES_VERSIONS for text in problems(item, version)]


def _rename(key, new):
    def damage(spec):
        spec[new] = spec.pop(key)

    return damage


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("RayService", _rename("upgradeStrategy", "upgradeStrategies")),
        ("RayService", lambda spec: spec["rayClusterConfig"]["authOptions"].update(mode="tokens")),
        ("RayService", lambda spec: spec.update(rayClusterDeletionDelaySeconds="360")),
        (
            "RayService",
            lambda spec: spec["rayClusterConfig"]["headGroupSpec"].update(rayStartParamz={}),
        ),
        (
            "RayService",
            lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(
                securityContxt={}
            ),
        ),
        (
            "RayService",
            lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"][
                "containers"
            ][0].update(image=3),
        ),
        ("RayService", lambda spec: spec.pop("rayClusterConfig")),
        ("NetworkPolicy", _rename("policyTypes", "policyType")),
        ("PodMonitor", _rename("podMetricsEndpoints", "endpoints")),
    ],
)
def test_closed_schema_catches(kind, damage):
    assert broken(kind, damage)


def test_strict_check_catches_a_typo_in_the_rendered_serve_config():
    text = rayservice(read_values("glm-4gpu"))["spec"]["serveConfigV2"]
    document = yaml.safe_load(text.replace("keep_alive_timeout_s", "keep_alive_timeout"))
    with pytest.raises(ConfigError, match="keep_alive_timeout: unknown key"):
        check_document(document, name="rendered")

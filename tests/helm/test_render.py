"""The rendered chart: lint, closed schemas, Serve's own schema and the project's strict check."""

import itertools
import json

import pytest
import yaml

from flare_ray.cli.config_check import check_document
from flare_ray.cli.plan import rank_bytes
from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.device.prepare import plan_engine
from tests.helm.rendering import (
    CHART,
    KUBERNETES_VERSIONS,
    changed,
    helm,
    objects,
    of_kind,
    pod_templates,
    problems,
    rayservice,
    read_values,
    render,
    serve_document,
    values_files,
)
from tests.recipes.glm5_next.published import published_config as glm
from tests.recipes.qwen4_exp.published import published_config as qwen
from tests.rules.sources import ROOT

SIZE_TOLERANCE_RATIO = 0.002
"""The chart knows so many bytes a slot; page tables of single slots differ by kilobytes."""
GIB = 1 << 30
ERROR_SEVERITY = 2

EVERYTHING = {
    "weights__fetch__enabled": True,
    "weights__fetch__repository": "zai-org/GLM-5.3-Flash",
    "weights__fetch__endpoint": "https://hub.example.org",
    "weights__fetch__private": True,
    "weights__fetch__token__value": "hf_secret",
    "auth__existingSecret": "ray-token",
    "apiKeys__existingSecret": "api-keys",
    "upgrade__type": "NewClusterWithIncrementalUpgrade",
    "upgrade__incremental__gatewayClassName": "istio",
    "autoscaler__enabled": True,
    "autoscaler__maxNodes": 3,
    "gcsFaultTolerance__redisAddress": "redis:6379",
    "gcsFaultTolerance__existingSecret": "redis",
    "ingress__enabled": True,
    "ingress__host": "models.example.org",
    "ingress__tlsSecret": "models-tls",
    "ingress__className": "nginx",
    "ingress__annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "300"},
    "monitoring__podMonitor": True,
    "monitoring__serviceMonitor": True,
    "monitoring__dashboard": True,
    "monitoring__labels": {"release": "prometheus"},
    "httpWorkers__replicas": 2,
    "image__pullSecrets": ["registry"],
    "image__digest": "sha256:" + "0" * 64,
    "head__nodeSelector": {"pool": "system"},
    "head__annotations": {"note": "head"},
    "head__livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 10},
    "head__priorityClassName": "high",
    "worker__runtimeClassName": "nvidia",
    "worker__nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "worker__affinity": {"podAntiAffinity": {}},
    "worker__topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "worker__extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "worker__extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "worker__extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "worker__readinessProbe": {"exec": {"command": ["true"]}},
    "httpWorkers__extraEnv": [{"name": "LOG_FORMAT", "value": "json"}],
    "httpWorkers__extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "httpWorkers__extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "httpWorkers__livenessProbe": {"exec": {"command": ["true"]}},
    "httpWorkers__readinessProbe": {"exec": {"command": ["true"]}},
    "httpWorkers__tolerations": [{"key": "http", "operator": "Exists"}],
    "httpWorkers__affinity": {"podAntiAffinity": {}},
    "httpWorkers__topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "serviceAccount__annotations": {"role": "none"},
    "networkPolicy__httpFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
}


def named(name: str) -> dict:
    """Values of a shipped file, or of everything at once."""
    if name == "everything":
        return changed(read_values("glm-4gpu"), **EVERYTHING)
    if name == "gateway":
        route = {"enabled": True, "name": "public", "namespace": "infra", "sectionName": "https"}
        route["hostnames"] = ["models.example.org"]
        return changed(read_values("glm-2gpu"), gateway=route)
    return read_values(name)


NAMES = [path.stem.removeprefix("values-") for path in values_files()] + ["everything", "gateway"]


@pytest.mark.parametrize("name", NAMES)
def test_lint_finds_nothing(name):
    report = helm().lint(CHART, named(name), strict=True)
    found = [item for item in report["messages"] if item["severity"] >= ERROR_SEVERITY]
    assert (found, report["errors"]) == ([], [])


@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_object_fits_its_closed_schema(name, kubernetes):
    found = objects(named(name))
    assert [(item["kind"], text) for item in found for text in problems(item, kubernetes)] == []


def test_everything_renders_every_kind():
    kinds = {item["kind"] for item in objects(named("everything"))}
    assert kinds == {
        *("RayService", "PersistentVolumeClaim", "Secret", "Job", "ServiceAccount", "Role"),
        *("RoleBinding", "Ingress", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"),
        *("ServiceMonitor", "ConfigMap", "Pod"),
    }
    assert of_kind(objects(named("gateway")), "HTTPRoute")


@pytest.mark.parametrize("name", NAMES)
def test_serve_config_passes_serves_schema_and_the_strict_check(name):
    checked = check_document(serve_document(named(name)), name=name)
    assert list(checked.configs) == ["flare"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("glm-4gpu", "glm"),
        ("deepseek-4gpu", "deepseek"),
        ("qwen-4gpu", "qwen"),
        ("cpu-demo", "glm-demo"),
    ],
)
def test_serve_config_means_the_same_as_the_deployment_file(name, file):
    rendered = serve_document(read_values(name))
    deployed = yaml.safe_load((ROOT / "deployments" / f"{file}.yaml").read_text())
    [ours], [theirs] = rendered["applications"], deployed["applications"]
    # Replicas stand beside the arguments; the checkpoint's place is the image's or the volume's.
    overrides = ours.pop("deployments")
    here, there = (DeploymentConfig.model_validate(app.pop("args")) for app in (ours, theirs))
    place = {"checkpoint": there.engine.checkpoint}
    if there.engine.recipe is None:
        place["recipe"] = None
    same = here.model_copy(update={"engine": here.engine.model_copy(update=place)})
    assert same == there
    assert ours == theirs
    replicas = there.engine_deployment.replicas
    assert overrides == [{"name": "Engine", "num_replicas": replicas, "user_config": {}}]


def test_serve_config_has_the_outer_settings_of_the_gpu_deployment_file():
    rendered = serve_document(read_values("glm-4gpu"))
    deployed = yaml.safe_load((ROOT / "deployments" / "glm.yaml").read_text())
    outer = ("proxy_location", "http_options", "logging_config")
    assert [rendered[key] for key in outer] == [deployed[key] for key in outer]


@pytest.mark.parametrize(
    ("name", "config", "ranks", "context", "cache"),
    [
        ("glm-4gpu", glm, 2, 131072, {}),
        ("glm-4gpu", glm, 2, 131072, {"enabled": False}),
        ("glm-4gpu", glm, 2, 131072, {"device_bytes": 50 << 30}),
        ("qwen-4gpu", qwen, 4, 131072, {}),
        ("qwen-4gpu", qwen, 1, 8192, {"enabled": False, "host_bytes": 1 << 30}),
    ],
)
def test_sum_of_bytes_is_what_plan_says(tmp_path, name, config, ranks, context, cache):
    """The chart computes in templates what `flare-ray plan` computes from shapes."""
    values = changed(
        read_values(name),
        tensorParallelSize=ranks,
        model__weightFormat="bfloat16",
        worker__gpuMemoryGiB=1000,
        engine__concurrency=12,
        engine__context_tokens=context,
        engine__prefix_cache=cache,
    )
    notes = render(values)["flare-ray/templates/NOTES.txt"]
    told = float(notes.split(" GiB a rank")[0].rsplit("= ", 1)[1])
    (tmp_path / "config.json").write_text(json.dumps(config()))
    arguments = serve_document(values)["applications"][0]["args"]["engine"]
    settings = EngineConfig.model_validate({**arguments, "checkpoint": str(tmp_path)})
    planned = rank_bytes(plan_engine(settings)) / GIB
    assert told == pytest.approx(planned, rel=SIZE_TOLERANCE_RATIO, abs=0.05)


POD_SETTINGS = {
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "high",
    "annotations": {"note": "a"},
    "extraEnv": [{"name": "A", "value": "1"}],
    "extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "livenessProbe": {"exec": {"command": ["true"]}},
    "readinessProbe": {"exec": {"command": ["true"]}},
}


GROUPS = {"head": "head", "worker": "engines", "httpWorkers": "http"}
ONE_POD = ("head", "topologySpreadConstraints")
"""What is no value: a cluster has one head, there is nothing to spread."""


def holds(node, part):
    """Whether `part` stands somewhere in an object."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return node == part or any(holds(child, part) for child in children)


@pytest.mark.parametrize(
    ("section", "setting"),
    [pair for pair in itertools.product(GROUPS, POD_SETTINGS) if pair != ONE_POD],
)
def test_setting_of_a_pod_reaches_its_group_and_no_other(section, setting):
    given = POD_SETTINGS[setting]
    values = changed(read_values("glm-4gpu"), httpWorkers__replicas=1)
    before = pod_templates(rayservice(values))
    after = pod_templates(rayservice(changed(values, **{f"{section}__{setting}": given})))
    assert [name for name in after if after[name] != before[name]] == [GROUPS[section]]
    assert holds(after[GROUPS[section]], given[0] if isinstance(given, list) else given)


@pytest.mark.parametrize("setting", ["nodeSelector", "tolerations", "affinity"])
def test_job_that_fetches_goes_where_it_may(setting):
    values = changed(named("everything"), **{f"weights__fetch__{setting}": POD_SETTINGS[setting]})
    [job] = of_kind(objects(values), "Job")
    assert job["spec"]["template"]["spec"][setting] == POD_SETTINGS[setting]


def test_head_takes_no_replica():
    start = rayservice(named("glm-4gpu"))["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert start["rayStartParams"]["num-cpus"] == "0"
    assert start["rayStartParams"]["num-gpus"] == "0"


def test_head_and_workers_read_the_same_serve_flags():
    templates = pod_templates(rayservice(changed(named("glm-4gpu"), httpWorkers__replicas=1)))
    environments = [
        {item["name"]: item["value"] for item in template["spec"]["containers"][0]["env"]}
        for template in templates.values()
    ]
    assert len(environments) == 3
    assert all(environment == environments[0] for environment in environments)
    assert environments[0]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_chart_version_alone_rebuilds_no_cluster():
    templates = pod_templates(rayservice(named("glm-4gpu"))).values()
    labels = {key for template in templates for key in template["metadata"]["labels"]}
    assert labels == {
        "app.kubernetes.io/part-of",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/component",
    }


def test_old_cluster_outlives_the_longest_answer():
    spec = rayservice(changed(named("glm-4gpu"), longestGenerationSeconds=1200))["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] == 1260
    templates = pod_templates({"spec": spec}).values()
    assert all(template["spec"]["terminationGracePeriodSeconds"] > 1200 for template in templates)
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["args"]["engine_deployment"]["graceful_shutdown_s"] == 1200


def test_large_counts_stay_integers():
    long = {"engine__context_tokens": 1048576, "engine__prefill_tokens": 512}
    values = changed(named("glm-4gpu"), **long)
    values = changed(values, engine__page_pool_tokens=4194304)
    engine = serve_document(values)["applications"][0]["args"]["engine"]
    assert (engine["context_tokens"], engine["page_pool_tokens"]) == (1048576, 4194304)
    assert isinstance(engine["context_tokens"], int)


def test_pods_run_without_root_or_capabilities():
    found = objects(named("everything"))
    specs = [
        template["spec"] for template in pod_templates(of_kind(found, "RayService")[0]).values()
    ]
    specs += [
        of_kind(found, "Job")[0]["spec"]["template"]["spec"],
        of_kind(found, "Pod")[0]["spec"],
    ]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_the_job_writes_weights_and_only_it_holds_the_token():
    found = objects(named("everything"))
    for template in pod_templates(of_kind(found, "RayService")[0]).values():
        spec = template["spec"]
        for container in spec["containers"] + spec.get("initContainers", []):
            [mount] = [m for m in container["volumeMounts"] if m["name"] == "weights"]
            assert mount["readOnly"] is True
            assert "HF_TOKEN" not in {item["name"] for item in container.get("env", [])}
    [job] = of_kind(found, "Job")
    [fetch] = job["spec"]["template"]["spec"]["containers"]
    [mount] = [m for m in fetch["volumeMounts"] if m["name"] == "weights"]
    assert "readOnly" not in mount
    [token] = [item for item in fetch["env"] if item["name"] == "HF_TOKEN"]
    [secret] = of_kind(found, "Secret")
    assert token["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]


def test_changed_weights_make_another_job():
    def name(**changes):
        return of_kind(objects(changed(named("everything"), **changes)), "Job")[0]["metadata"][
            "name"
        ]

    assert name() == name(replicas=1)
    assert name() != name(weights__fetch__revision="04c4e9e9")


def test_network_policy_closes_rays_ports():
    [policy] = of_kind(objects(named("glm-4gpu")), "NetworkPolicy")
    inner, *outer = policy["spec"]["ingress"]
    assert "ports" not in inner
    open_ports = {port["port"] for rule in outer for port in rule["ports"]}
    assert open_ports == {8000, 8080, 8265}
    for rule in outer:
        if 8265 in {port["port"] for port in rule["ports"]}:
            [peer] = rule["from"]
            assert peer["namespaceSelector"]["matchLabels"]


def test_selectors_find_the_pods_they_are_for():
    found = objects(named("everything"))
    labels = {
        group: template["metadata"]["labels"]
        for group, template in pod_templates(of_kind(found, "RayService")[0]).items()
    }

    def selected(selector):
        wanted = selector["matchLabels"].items()
        return {group for group, own in labels.items() if wanted <= own.items()}

    budgets = of_kind(found, "PodDisruptionBudget")
    assert [selected(item["spec"]["selector"]) for item in budgets] == [{"head"}, {"engines"}]
    [monitor] = of_kind(found, "PodMonitor")
    assert selected(monitor["spec"]["selector"]) == set(labels)


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 6),
        ({"podDisruptionBudget__maxUnavailable": 1}, 2),
        ({"autoscaler": {"enabled": True, "minNodes": 2, "maxNodes": 5}}, 10),
    ],
)
def test_budgets_count_what_must_stay_since_no_scale_can_be_asked(changes, least):
    """Kubernetes finds no scale of a RayCluster: `maxUnavailable` would never let a pod go."""
    values = changed(named("glm-2gpu"), replicas=3, **changes)
    head, engines = of_kind(objects(values), "PodDisruptionBudget")
    assert "maxUnavailable" not in {**head["spec"], **engines["spec"]}
    assert (head["spec"]["minAvailable"], engines["spec"]["minAvailable"]) == (2, least)


def test_names_of_digits_stay_text():
    values = changed(
        named("everything"),
        apiKeys__existingSecret="123",
        auth__existingSecret="1",
        ingress__tlsSecret="2",
        weights__fetch__token={"existingSecret": "3"},
        gcsFaultTolerance__existingSecret="4",
        image__pullSecrets=["5"],
        head__priorityClassName="6",
        worker__runtimeClassName="7",
        weights__claim__storageClassName="8",
        ingress__className="9",
    )
    found = objects(values)
    assert [text for item in found for text in problems(item, KUBERNETES_VERSIONS[1])] == []


@pytest.mark.parametrize("given", [{"file": "keys: []\n"}, {"existingSecret": "team-keys"}])
def test_notes_warn_only_where_no_key_is_asked_for(given):
    path = "flare-ray/templates/NOTES.txt"
    assert "no API keys" in render(named("glm-4gpu"))[path]
    assert "no API keys" not in render(changed(named("glm-4gpu"), apiKeys=given))[path]


def test_file_of_api_keys_makes_the_secret_that_pods_mount():
    values = changed(named("glm-4gpu"), apiKeys__file="keys: []\n")
    found = objects(values)
    [secret] = of_kind(found, "Secret")
    assert secret["stringData"] == {"keys.yaml": "keys: []\n"}
    [service] = of_kind(found, "RayService")
    volumes = pod_templates(service)["engines"]["spec"]["volumes"]
    [volume] = [item for item in volumes if item["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    ingress = serve_document(values)["applications"][0]["args"]["ingress"]
    assert ingress["keys_file"] == "/etc/flare-ray/keys/keys.yaml"


def test_helm_test_asks_with_a_key_or_expects_the_refusal():
    def container(**changes):
        [pod] = of_kind(objects(changed(named("glm-4gpu"), **changes)), "Pod")
        [only] = pod["spec"]["containers"]
        return only["args"][0], {item["name"] for item in only["env"]}

    script, names = container()
    assert ("Bearer" in script, "401" in script, "KEY" in names) == (False, False, False)
    script, names = container(apiKeys__existingSecret="keys")
    assert ("completions" in script, "401" in script, "KEY" in names) == (False, True, False)
    script, names = container(
        apiKeys__existingSecret="keys", tests__apiKey__existingSecret="probe-key"
    )
    assert (script.count("Bearer $KEY"), "401" in script, "KEY" in names) == (2, False, True)


def test_notes_tell_the_gpus_an_upgrade_needs():
    notes = render(changed(named("glm-2gpu"), replicas=3))["flare-ray/templates/NOTES.txt"]
    assert "6 more GPU(s)" in notes
    notes = render(changed(named("glm-2gpu"), upgrade__type="None"))[
        "flare-ray/templates/NOTES.txt"
    ]
    assert "NOT rolled out" in notes


def test_api_keys_are_mounted_whole_where_replicas_run_and_named_in_the_settings():
    values = changed(read_values("glm-4gpu"), apiKeys__existingSecret="team-keys")
    service = rayservice(values)
    ingress = serve_document(values)["applications"][0]["args"]["ingress"]
    assert ingress["keys_file"] == "/etc/flare-ray/keys/keys.yaml"
    for name, template in pod_templates(service).items():
        spec = template["spec"]
        secrets = [v["secret"]["secretName"] for v in spec["volumes"] if v["name"] == "api-keys"]
        mounts = [
            mount
            for container in spec["containers"]
            for mount in container["volumeMounts"]
            if mount["name"] == "api-keys"
        ]
        if name == "head":
            assert not secrets + mounts
        else:
            assert secrets == ["team-keys"]
            # By subPath it would never change.
            (mount,) = mounts
            assert mount["mountPath"] == "/etc/flare-ray/keys"
            assert "subPath" not in mount


def test_without_a_secret_nothing_asks_for_keys():
    values = read_values("glm-4gpu")
    assert "keys_file" not in serve_document(values)["applications"][0]["args"]["ingress"]
    assert "api-keys" not in json.dumps(rayservice(values))


@pytest.mark.parametrize("scaling", [None, {"max_replicas": 3}])
def test_live_settings_stand_beside_the_arguments_and_change_none_of_them(scaling):
    values = read_values("cpu-demo")
    if scaling:
        values = changed(values, engineDeployment__autoscaling=scaling)
    with_live = changed(values, engineLive__max_draft_tokens=1)
    before, after = (serve_document(v)["applications"][0] for v in (values, with_live))
    assert after["args"] == before["args"]
    (override,) = after["deployments"]
    assert override["user_config"] == {"max_draft_tokens": 1}
    assert ("num_replicas" in override) == (scaling is None)

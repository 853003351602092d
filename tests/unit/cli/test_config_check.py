"""The strict check of deployment files: every key, every value, named by its path."""

import copy
from pathlib import Path

import pytest
import yaml

from flare_ray.cli.config_check import check_document, check_file, read_document
from flare_ray.errors import ConfigError
from tests.rules.sources import ROOT

DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
DEMO = ROOT / "deployments" / "glm-demo.yaml"
FOUR_GPUS = ROOT / "deployments" / "glm.yaml"
APPLICATION = "applications[0]"


def document(path=FOUR_GPUS):
    return read_document(path)


def problems(doc):
    """Lines of the refusal, without the title."""
    with pytest.raises(ConfigError) as refusal:
        check_document(doc, name="file")
    title, *lines = str(refusal.value).splitlines()
    assert title == "file:"
    return lines


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_shipped_file_passes(path):
    text = check_file(path)
    assert "correct" in text
    assert "application flare" in text


def test_shipped_files_exist():
    assert {DEMO, FOUR_GPUS} <= set(DEPLOYMENTS)


def put(doc, path, value):
    """Set a value at a path of keys and indices, making mappings on the way."""
    *parents, last = path
    node = doc
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
    node[last] = value


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (["http_option"], "http_option: unknown key; did you mean http_options?"),
        (["http_options", "prot"], "http_options.prot: unknown key; did you mean port?"),
        (["grpc_options", "x"], "grpc_options.x: unknown key"),
        (["logging_config", "colour"], "logging_config.colour: unknown key"),
        (["applications", 0, "arg"], f"{APPLICATION}.arg: unknown key; did you mean args?"),
        (
            ["applications", 0, "args", "model"],
            f"{APPLICATION}.args.model: unknown key; did you mean model_name?",
        ),
        (
            ["applications", 0, "args", "engine", "speculation", "width"],
            f"{APPLICATION}.args.engine.speculation.width: unknown key; did you mean widths?",
        ),
        (
            ["applications", 0, "args", "ingress", "max_replica"],
            f"{APPLICATION}.args.ingress.max_replica: unknown key; did you mean max_replicas?",
        ),
    ],
)
def test_unknown_key_is_named_by_its_path(path, told):
    doc = document()
    put(doc, path, 1)
    assert any(line.startswith(told) for line in problems(doc))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ({"max_ongoing": 5}, ".max_ongoing: unknown key"),
        ({"ray_actor_options": {"num_gpu": 1}}, ".ray_actor_options.num_gpu: unknown key"),
        (
            {"autoscaling_config": {"max_ongoing_requests": 9}},
            ".autoscaling_config.max_ongoing_requests: unknown key",
        ),
        ({"placement_group_strategy": "STRICTPACK"}, ".placement_group_strategy: must be one of"),
        ({"placement_group_strategy": "SPREAD"}, ".placement_group_strategy: ranks share a node"),
        ({"placement_group_bundles": [{"GPU": 1}]}, ".placement_group_bundles: 4 rank(s) need"),
        ({"name": "Engin"}, ".name: this application has Engine and Ingress"),
        ({"num_replicas": 0}, ".num_replicas"),
    ],
)
def test_override_of_a_deployment_is_checked_too(override, told):
    doc = document()
    doc["applications"][0]["deployments"] = [{"name": "Engine", **override}]
    path = f"{APPLICATION}.deployments[0]"
    assert any(line.startswith(path + told) for line in problems(doc))


def test_number_of_autoscaled_engines_is_not_set_twice():
    doc = document()
    doc["applications"][0]["args"]["engine_deployment"]["autoscaling"] = {"max_replicas": 3}
    doc["applications"][0]["deployments"] = [{"name": "Engine", "num_replicas": 2}]
    path = f"{APPLICATION}.deployments[0].num_replicas"
    assert any(line.startswith(path) for line in problems(doc))


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("Engine", {"max_drafts": 1}, ".max_drafts: unknown key; did you mean max_draft_tokens?"),
        ("Engine", {"max_waiting": -1}, ".max_waiting: Input should be greater than or equal to 0"),
        ("Engine", {"max_waiting": 999}, ".max_waiting: the engine is started for at most 128"),
        ("Ingress", {"max_waiting": 1}, ": this deployment has no live settings; leave it out"),
    ],
)
def test_wrong_live_settings_are_named(name, settings, told):
    doc = document()
    doc["applications"][0]["deployments"] = [{"name": name, "user_config": settings}]
    (line,) = problems(doc)
    assert line.startswith(f"{APPLICATION}.deployments[0].user_config{told}")


def test_live_settings_pass():
    doc = document()
    settings = {"max_draft_tokens": 2, "max_waiting": 8}
    doc["applications"][0]["deployments"] = [{"name": "Engine", "user_config": settings}]
    assert check_document(doc, name="file").document is doc


def test_right_bundles_may_be_repeated():
    doc = document()
    rank = {"CPU": 2.0, "GPU": 1.0}
    bundles = [{"CPU": 2.5, "GPU": 1.0}, rank, rank, rank]
    doc["applications"][0]["deployments"] = [{"name": "Engine", "placement_group_bundles": bundles}]
    assert check_document(doc, name="file").configs["flare"].engine.tensor_parallel_size == 4


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("engine", {"tensor_parallel_size": 3}, "engine.tensor_parallel_size: Input should be"),
        ("engine", {"tensor_parallel_size": 8}, "engine.tensor_parallel_size: recipe"),
        ("engine", {"concurrency": "many"}, "engine.concurrency: Input should be"),
        ("engine", {"recipe": "none-such"}, "engine.recipe: recipe 'none-such' does not exist"),
        ("engine", {"page_pool_tokens": 64}, "engine: page_pool_tokens 64 is below"),
        (
            "engine",
            {"speculation": {"widths": [1, 3]}, "recipe": None, "device": "cud"},
            "engine.device",
        ),
        ("ingress", {"min_replicas": 9}, "ingress: min_replicas 9 exceeds max_replicas 4"),
        (
            "ingress",
            {"routing": {"by": "load", "load_factor": 2, "spare_requests": 0}},
            "ingress.routing: by: load uses no load_factor, spare_requests",
        ),
        (
            "ingress",
            {"routing": {"session_header": "authorization"}},
            "ingress.routing: session_header authorization has another meaning",
        ),
        ("ingress", {"routing": {"session_header": "X-Id"}}, "ingress.routing.session_header"),
        ("ingress", {"routing": {"load_factor": 0.9}}, "ingress.routing.load_factor"),
        (
            "engine_deployment",
            {"replicas": 3, "autoscaling": {"max_replicas": 3}},
            "engine_deployment: autoscaling.max_replicas 3 does not exceed replicas 3",
        ),
        (
            "engine_deployment",
            {"autoscaling": {"max_replicas": 3, "page_usage": 1.5}},
            "engine_deployment.autoscaling.page_usage",
        ),
    ],
)
def test_wrong_value_is_named_by_its_path(section, values, told):
    doc = document()
    doc["applications"][0]["args"][section].update(values)
    assert any(line.startswith(f"{APPLICATION}.args.{told}") for line in problems(doc))


def test_missing_setting_is_named():
    doc = document()
    del doc["applications"][0]["args"]["engine"]["checkpoint"]
    assert f"{APPLICATION}.args.engine.checkpoint: is required" in problems(doc)


def test_all_problems_are_told_together_and_once():
    doc = document()
    doc["nonsense"] = 1
    doc["applications"][0]["args"]["engine"]["nonsense"] = 1
    doc["applications"][0]["args"]["engine"]["concurrency"] = 0
    lines = problems(doc)
    assert len(lines) == len(set(lines)) == 3


def test_two_applications_on_one_route_are_serves_own_complaint():
    doc = document()
    doc["applications"].append(copy.deepcopy(doc["applications"][0]))
    assert any("duplicate" in line or "multiple" in line for line in problems(doc))


def test_foreign_application_is_left_to_serve():
    doc = document()
    doc["applications"].append({"name": "other", "route_prefix": "/o", "import_path": "a.b:c"})
    assert set(check_document(doc, name="file").configs) == {"flare"}


def test_checking_does_not_change_the_document():
    doc = document()
    before = copy.deepcopy(doc)
    check_document(doc, name="file")
    assert doc == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2\n", "repeated key"),
        ("a: [", "is not YAML"),
        ("- 1\n", "must hold a mapping"),
        ("", "must hold a mapping"),
    ],
)
def test_unreadable_file_is_refused(tmp_path, text, told):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_document(path)


def test_missing_file_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(Path("none-such.yaml"))


def test_file_without_applications_is_refused(tmp_path):
    assert any("applications" in line for line in problems(yaml.safe_load("http_options: {}")))


def test_address_must_be_named():
    doc = document(DEMO)
    del doc["http_options"]["host"]
    assert any(line.startswith("http_options.host: is required") for line in problems(doc))


def test_open_service_is_told(tmp_path):
    assert "no API keys (ingress.keys_file)" in check_file(DEMO)
    doc = document(DEMO)
    put(doc, ["applications", 0, "args", "ingress", "keys_file"], "keys.yaml")
    file = tmp_path / "closed.yaml"
    file.write_text(yaml.safe_dump(doc))
    assert "no API keys" not in check_file(file)

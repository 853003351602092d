"""The chart without rendering it: what is generated is current, defaults fit the schema. Needs no
Helm engine."""

import json

import jsonschema
import pytest
import yaml

from flare_ray.config import DeploymentConfig
from helm import generate
from tests.helm.rendering import CHART, changed, read_values, values_files

SIZE_DRIFT_RATIO = 0.01
"""A fifth of the headroom that the chart leaves free."""


def defaults() -> dict:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def merged(base: dict, over: dict) -> dict:
    """Helm's merge: mappings are merged, null removes, everything else replaces."""
    result = dict(base)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def schema_errors(values: dict) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    checker = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(values)]


def test_generated_files_are_current():
    """Sizes may drift a little, so that not every byte of a state's layout asks for a new chart."""
    committed = yaml.safe_load((CHART / "files" / "models.yaml").read_text())
    outputs = generate.outputs(committed)
    stale = [path.name for path, text in outputs.items() if path.read_text() != text]
    assert not stale, "run python helm/generate.py"


def test_sizes_are_those_of_the_recipes():
    committed = yaml.safe_load((CHART / "files" / "models.yaml").read_text())

    def figures(node, where=""):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from figures(value, f"{where}{key}.")
            else:
                yield f"{where}{key}", value

    ours, theirs = dict(figures(committed)), dict(figures(generate.models()))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        expected = pytest.approx(value, rel=SIZE_DRIFT_RATIO) if isinstance(value, int) else value
        assert ours[name] == expected, f"{name}: run python helm/generate.py"


def test_schema_is_valid_itself():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_values_file_fits_the_schema(path):
    assert schema_errors(merged(defaults(), yaml.safe_load(path.read_text()))) == []


@pytest.mark.parametrize("path", values_files(), ids=lambda path: path.stem)
def test_values_file_changes_only_values_that_exist(path):
    """A nested typo of an open mapping would pass the schema."""

    def unknown(over, base, where=""):
        for key, value in over.items():
            if key not in base and not where.startswith(("engine", "httpReplicas")):
                yield f"{where}{key}"
            elif isinstance(value, dict) and isinstance(base.get(key), dict):
                yield from unknown(value, base[key], f"{where}{key}.")

    assert list(unknown(yaml.safe_load(path.read_text()), defaults())) == []


@pytest.mark.parametrize(
    ("section", "field", "given_by"),
    [
        ("engine", "checkpoint", "model.checkpoint"),
        ("engine", "tensor_parallel_size", "tensorParallelSize"),
        ("engine", "recipe", "model.preset"),
        ("engine", "device", "device"),
        ("engineDeployment", "replicas", "replicas"),
        ("engineDeployment", "graceful_shutdown_s", "longestGenerationSeconds"),
    ],
)
def test_setting_that_the_chart_gives_is_refused_in_its_section(section, field, given_by):
    values = merged(defaults(), {section: {field: 1}})
    assert any(field in error for error in schema_errors(values)), given_by


def test_every_typed_setting_is_a_value():
    """No setting of the project is out of a chart user's reach."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    sections = {
        "engine": ("engine", {"checkpoint", "recipe", "tensor_parallel_size", "device"}),
        "engine_deployment": ("engineDeployment", {"replicas", "graceful_shutdown_s"}),
        "ingress": ("httpReplicas", {"keys_file"}),
    }
    for field, (value, given) in sections.items():
        known = set(DeploymentConfig.model_fields[field].annotation.model_fields)
        assert set(schema[value]["properties"]) == known - given
    assert set(DeploymentConfig.model_fields) == {*sections, "model_name", "compat_metrics"}


@pytest.mark.parametrize(
    "change",
    [
        {"repliacs": 2},
        {"engine__contxt_tokens": 4096},
        {"engine__speculation__draft_token": 3},
        {"worker__gpu": 4},
        {"upgrade__type": "Rolling"},
        {"tensorParallelSize": 3},
        {"worker__memory": "256GB"},
        {"image__digest": "sha256:abc"},
        {"replicas": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_schema_refuses(change):
    assert schema_errors(changed(merged(defaults(), read_values("glm-4gpu")), **change))


def test_every_value_has_an_explanation():
    explained = {path for path, _, _ in generate.value_rows()}

    def missing(node, where=""):
        for key, value in node.items():
            path = f"{where}{key}"
            if any(path == known or path.startswith(f"{known}.") for known in explained):
                continue
            if isinstance(value, dict) and value:
                yield from missing(value, f"{path}.")
            else:
                yield path

    assert list(missing(defaults())) == []

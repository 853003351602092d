"""Rendering the chart with Helm's own engine, and closed checks of what comes out.

The engine and Kubernetes' schemas are packages of the `chart` extra; a test that needs one of them
skips with the reason where it is not installed.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.rules.sources import ROOT

CHART = ROOT / "helm" / "flare-ray"
SCHEMAS = Path(__file__).resolve().parent / "schemas"
KUBERNETES_VERSIONS = ("1.29.0", "1.37.0")
"""The oldest that Chart.yaml admits, and the newest whose schemas are packaged."""
RELEASE, NAMESPACE = "demo", "ml"
EXTRA = "install the `chart` extra: pip install -e '.[chart]'"

Values = dict[str, Any]
Object = dict[str, Any]


def values_files() -> list[Path]:
    """The shipped values files."""
    return sorted(CHART.glob("values-*.yaml"))


def read_values(name: str) -> Values:
    """Values of a shipped file."""
    return yaml.safe_load((CHART / f"values-{name}.yaml").read_text(encoding="utf-8"))


def changed(values: Values, **changes: Any) -> Values:
    """A copy with values replaced; a name's `__` are dots."""
    result = copy.deepcopy(values)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return result


def helm():
    """Helm's engine; skips the test without it."""
    return pytest.importorskip("helm_python", reason=f"no Helm engine: {EXTRA}")


def render(values: Values, *, name: str = RELEASE) -> dict[str, str]:
    """Template path -> text, as `helm template` gives it.

    Raises:
        HelmError: the values are refused, by schema or by the chart's own checks.
    """
    engine = helm()
    with engine.Chart.load(CHART) as chart:
        return chart.render(values, name=name, namespace=NAMESPACE)


def refusal(values: Values, **options: Any) -> str:
    """Why the values are refused."""
    engine = helm()
    with pytest.raises(engine.HelmError) as caught:
        render(values, **options)
    return str(caught.value)


def objects(values: Values) -> list[Object]:
    """Every rendered object."""
    return [
        document
        for path, text in render(values).items()
        if not path.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]


def of_kind(found: list[Object], kind: str) -> list[Object]:
    """Objects of one kind."""
    return [item for item in found if item["kind"] == kind]


def rayservice(values: Values) -> Object:
    """The one RayService."""
    [service] = of_kind(objects(values), "RayService")
    return service


def serve_document(values: Values) -> dict[str, Any]:
    """What the RayService gives to Serve."""
    return yaml.safe_load(rayservice(values)["spec"]["serveConfigV2"])


def pod_templates(service: Object) -> dict[str, Object]:
    """Pod templates of a RayService by group."""
    config = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in config["workerGroupSpecs"]}
    return {"head": config["headGroupSpec"]["template"], **groups}


def problems(item: Object, kubernetes: str) -> list[str]:
    """What is wrong with an object: unknown fields, wrong types, at every level."""
    custom = SCHEMAS / f"{item['kind']}.json"
    if not custom.exists():
        return list(_kubernetes_problems(item, kubernetes))
    resource = json.loads(custom.read_text())
    if item["apiVersion"] != resource["apiVersion"]:
        return [f"apiVersion {item['apiVersion']} is not {resource['apiVersion']}"]
    checker = _custom_validator(item["kind"])
    found = [f"{error.json_path}: {error.message}" for error in checker.iter_errors(item)]
    for where, template in _templates(item):
        # A pod template is checked as the pod it makes.
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        found += [f"{where}: {text}" for text in _kubernetes_problems(pod, kubernetes)]
    return found


def _templates(item: Object) -> Iterator[tuple[str, Object]]:
    if item["kind"] == "RayService" and "rayClusterConfig" in item["spec"]:
        yield from pod_templates(item).items()


def _kubernetes_problems(item: Mapping[str, Any], version: str) -> Iterator[str]:
    validate = pytest.importorskip("kubernetes_validate", reason=f"no schemas: {EXTRA}")
    try:
        validate.validate(dict(item), version, strict=True)
    except validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


@functools.cache
def _custom_validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())["fields"]
    return jsonschema.Draft202012Validator(_without_references(schema))


def _without_references(node: Any) -> Any:
    """Pod templates are objects here; `problems` checks them as pods."""
    if isinstance(node, list):
        return [_without_references(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$kubernetes" in node:
        return {"type": "object"}
    return {key: _without_references(value) for key, value in node.items()}

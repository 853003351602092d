"""Values of the Helm chart, rendered by Helm's own engine so that `flare-ray check` can read them.

The chart refuses unknown keys and wrong types by its schema, and by its templates what contradicts
itself or does not fit: bytes of a rank against the GPU, ranks against a node, secrets that are not
named. Nothing of that is repeated here; Helm's words are turned into lines that begin with the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flare_ray.cli.config_check import Document, UniqueKeyLoader, suggestion
from flare_ray.errors import ConfigError

CHART_FILE = "Chart.yaml"
DEFAULT_CHART = Path("helm/flare-ray")
"""Where the chart lies in a checkout."""
RELEASE = "check"
NOTES = "NOTES.txt"
SERVE_KEYS = frozenset({"applications", "http_options", "proxy_location", "logging_config"})
"""Top-level keys of deployment files, of which values have none."""
_VIOLATION = re.compile(r"^ *- at '(?P<where>[^']*)': (?P<what>.*)$", re.MULTILINE)
_UNKNOWN = re.compile(r"additional properties (?P<keys>'.*') not allowed")
_GROUP = "validation failed"
"""What Helm says above the lines of one object."""
_RULE = re.compile(r"execution error at \([^)]*\): (?P<what>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a chart makes of values.

    Attributes:
        values: merged over the chart's defaults.
        objects: rendered, as `helm template` prints them.
    """

    values: Mapping[str, Any]
    objects: list[Document]


def may_be_values(document: Mapping[str, Any]) -> bool:
    """Whether a mapping is a chart's values rather than a deployment file."""
    return bool(document) and "kind" not in document and not SERVE_KEYS & document.keys()


def find_chart(values: Path) -> Path:
    """The chart of a values file: its own folder, or the chart of the checkout in use.

    Raises:
        ConfigError: there is none; names the option.
    """
    for folder in (values.parent, DEFAULT_CHART):
        if (folder / CHART_FILE).is_file():
            return folder
    raise ConfigError(
        f"{values} is no deployment file (no `applications:`). If it holds values of the chart, "
        f"name the chart's folder: --chart {DEFAULT_CHART}"
    )


def render_values(values: Document, chart: Path, *, name: str) -> Rendered:
    """Render a chart as `helm template` does; no cluster is asked.

    Args:
        name: what to call the values in messages.
    Raises:
        ConfigError: Helm is missing, the folder holds no chart, or the values are refused: one line
            for each key that the schema refuses, else the first rule that is broken.
    """
    try:
        import helm_python as helm
    except ImportError as error:
        raise ConfigError(
            f"{name}: values are rendered by Helm's engine, which is not installed: pip install "
            "'flare-ray[chart]', or pipe: helm template NAME CHART -f FILE | flare-ray check -"
        ) from error
    try:
        with helm.Chart.load(chart) as loaded:
            try:
                merged = loaded.merge_values(values)
                texts = loaded.render(values, name=RELEASE)
            except helm.HelmError as error:
                lines = _refusals(str(error), loaded.schema or {})
                raise ConfigError("\n".join([f"{name}:", *lines])) from error
    except helm.HelmError as error:
        raise ConfigError(f"{chart} is no chart: {error}") from error
    objects = [
        item
        for path, text in texts.items()
        if not path.endswith(NOTES)
        for item in yaml.load_all(text, Loader=UniqueKeyLoader)
        if item
    ]
    return Rendered(merged, objects)


def paths_of(values: Any, wanted: str, where: str = "") -> Iterator[str]:
    """Dotted paths of the values that equal `wanted`."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from paths_of(value, wanted, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from paths_of(value, wanted, f"{where}[{i}]")
    elif values == wanted:
        yield where


def _refusals(text: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Helm's refusal, a line for each key."""
    rule = _RULE.search(text)
    if rule:
        yield rule["what"]
        return
    violations = list(_VIOLATION.finditer(text))
    if not violations:
        yield text
    for violation in violations:
        if violation["what"] == _GROUP:
            continue
        path = violation["where"].strip("/").replace("/", ".")
        unknown = _UNKNOWN.fullmatch(violation["what"])
        if unknown is None:
            yield f"{path}: {violation['what']}" if path else violation["what"]
            continue
        known = _known_keys(schema, path.split(".") if path else [])
        for key in re.findall(r"'([^']*)'", unknown["keys"]):
            yield f"{path}.{key}".lstrip(".") + f": unknown key{suggestion(key, known)}"


def _known_keys(schema: Mapping[str, Any], path: list[str]) -> list[str]:
    """Keys that a closed schema has at a path; none where the path leads through a choice."""
    node = schema
    for part in [*path, None]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        if part is not None:
            node = node.get("properties", {}).get(part, {})
    return list(node.get("properties", {}))

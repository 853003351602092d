"""What the chart holds that follows from elsewhere: `python helm/generate.py` writes it anew.

values.schema.json   from schema.yaml beside this file and the project's typed settings
files/models.yaml    bytes per rank of every preset, by `flare-ray plan`'s own arithmetic
README.md            from the comments in values.yaml
dashboards/          from the names of the metrics (dashboard.py)
docs/operators/capacity.md   from files/models.yaml (capacity.py)
deployments/images/geometries/   published config.json of the presets, for kernels compiled ahead

A test compares all of them with what is committed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.config.live import LiveSettings
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.device.capacity import HEADROOM_RATIO
from flare_ray.device.graphs.pool import SMALLEST_BYTES, PoolSizes, row_bytes
from flare_ray.device.prepare import SNAPSHOTS_PER_SLOT, make_plan, resolve
from flare_ray.device.speculation.prefill import SCORED_ROWS
from flare_ray.device.state.layout import DTYPE_BYTES
from flare_ray.device.weights.budget import HeldForm, rank_weight_bytes
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.kept import EXPERTS
from flare_ray.device.weights.stored import ROW_BLOCK
from flare_ray.recipes.declaration import TensorSpec
from helm.capacity import capacity_text
from helm.dashboard import dashboard
from tests.recipes.deepseek_v41.published import published_config as published_deepseek
from tests.recipes.glm5_next.published import published_config as published_glm
from tests.recipes.qwen4_exp.published import published_config as published_qwen

FormOf = Callable[[TensorSpec], HeldForm]

CHART = ROOT / "helm" / "flare-ray"
SCHEMA_SOURCE = ROOT / "helm" / "schema.yaml"
GEOMETRIES = ROOT / "deployments" / "images" / "geometries"
PUBLISHED = {
    "glm-5.3-flash": published_glm,
    "deepseek-v4.1-flash": published_deepseek,
    "qwen3.8-flash": published_qwen,
}
"""Preset -> its release's config.json."""
DEMO = ROOT / "deployments" / "demo" / "glm"
# The largest number of rows and drafts that the default token capacity admits: scratch is the same
# or less for every setting, so one bound per preset does.
SCRATCH_CONCURRENCY = 16
SCRATCH_DRAFTS = 7

WIDE_LINES = 110
LIVE = "user_config"


def main() -> None:
    """Write every generated file."""
    for path, text in outputs(models()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


def outputs(sizes: dict[str, Any]) -> dict[Path, str]:
    """Path and text of every generated file, for the presets of `models`."""
    return {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        CHART / "files" / "models.yaml": models_text(sizes),
        ROOT / "docs" / "operators" / "capacity.md": capacity_text(sizes),
        CHART / "README.md": readme_text(),
        CHART / "dashboards" / "flare-ray.json": json.dumps(dashboard(), indent=1) + "\n",
        **{
            GEOMETRIES / name / "config.json": json.dumps(published(), indent=1) + "\n"
            for name, published in PUBLISHED.items()
        },
    }


# --- values.schema.json


def values_schema() -> dict[str, Any]:
    """The closed schema of the chart's values."""
    source = yaml.safe_load(SCHEMA_SOURCE.read_text(encoding="utf-8"))
    definitions: dict[str, Any] = {}
    schema = _expand(source, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the flare-ray chart",
        "$defs": definitions,
        **schema,
    }


def _expand(node: Any, definitions: dict[str, Any]) -> Any:
    """`props:` becomes a closed object, `config:` the typed settings without the keys `omit:`."""
    if isinstance(node, list):
        return [_expand(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "config" in node:
        return _config_schema(node["config"], node["omit"], definitions)
    expanded = {key: _expand(value, definitions) for key, value in node.items() if key != "props"}
    if "props" in node:
        properties = {key: _expand(value, definitions) for key, value in node["props"].items()}
        expanded = {
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
            "required": [key for key, value in properties.items() if _is_needed(value)],
            **expanded,
        }
    return expanded


def _is_needed(schema: dict[str, Any]) -> bool:
    """Whether the chart cannot do without: a section, or a value that may not be empty.

    Helm takes a value that is set to null out of the defaults; without this the templates would
    meet its absence.
    """
    if "properties" in schema:
        return True
    check = jsonschema.Draft202012Validator(schema)
    return not any(check.is_valid(empty) for empty in (None, "", [], {}))


def _config_schema(section: str, omitted: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of a section of `DeploymentConfig`, or of the live settings; its nested models become
    definitions."""
    live = section == LIVE
    model = LiveSettings if live else DeploymentConfig.model_fields[section].annotation
    schema = model.model_json_schema()
    for name, definition in schema.pop("$defs", {}).items():
        definitions[name] = _without_defaults(definition)
    properties = {
        key: _without_defaults(value)
        for key, value in schema["properties"].items()
        if key not in omitted
    }
    assert len(properties) == len(schema["properties"]) - len(omitted), (section, omitted)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _without_defaults(node: Any) -> Any:
    """Defaults live in the settings alone, so that a change there is no change here."""
    if isinstance(node, list):
        return [_without_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_defaults(value)
        for key, value in node.items()
        if key not in ("default", "title")
    }


# --- files/models.yaml


def models_text(sizes: dict[str, Any]) -> str:
    """Presets as YAML."""
    head = (
        "# Written by helm/generate.py from the recipes' shapes; bytes are of one rank.\n"
        "# weights: target, drafter and their scales; tables: hashed n-gram tables, which may lie\n"
        "# in host memory; page: 64 tokens; slot: one request's state, fixed: state of none;\n"
        "# snapshot: a kept prefix beside its pages, eight a slot or by device_bytes;\n"
        "# scratch: a bound; pool: intermediates of captured programs, by the largest one's rows.\n"
    )
    return head + yaml.safe_dump(sizes, sort_keys=False, width=WIDE_LINES)


def models() -> dict[str, Any]:
    """Preset -> what the chart must know to size an engine."""
    nvfp4 = {"bfloat16": None, "nvfp4": _experts_in(WeightFormat.NVFP4_MODELOPT)}
    formats: dict[str, dict[str, FormOf | None]] = {
        "glm-5.3-flash": nvfp4,
        "deepseek-v4.1-flash": {"mxfp4": _deepseek_release},
        "qwen3.8-flash": nvfp4,
    }
    large = {name: _published(PUBLISHED[name](), forms) for name, forms in formats.items()}
    demo = _preset(DEMO, device="cpu", dtype="float32", formats={"float32": None})
    return {
        "headroomPercent": round(HEADROOM_RATIO * 100),
        "snapshotsPerSlot": SNAPSHOTS_PER_SLOT,
        "presets": {**large, "glm-demo": demo},
    }


def _published(config: dict[str, Any], formats: dict[str, FormOf | None]) -> dict[str, Any]:
    """A released model in every format that the chart offers."""
    with tempfile.TemporaryDirectory() as folder:
        published = Path(folder)
        (published / "config.json").write_text(json.dumps(config))
        return _preset(published, device="cuda", dtype="bfloat16", formats=formats)


def _experts_in(format: WeightFormat) -> FormOf:
    """Routed experts in a format, everything else plain: the published 4-bit releases."""

    def form_of(spec: TensorSpec) -> HeldForm:
        routed = EXPERTS in spec.name and len(spec.shape) == 2
        return HeldForm(format) if routed else HeldForm()

    return form_of


def _deepseek_release(spec: TensorSpec) -> HeldForm:
    """Routed experts in MXFP4, table rows in FP8 with an exponent per 32 channels."""
    if spec.table:
        return HeldForm(WeightFormat.FP8_BLOCK, block=ROW_BLOCK, scale_bytes=1)
    return _experts_in(WeightFormat.MXFP4)(spec)


def _preset(folder: Path, *, device: str, dtype: str, formats: dict[str, Any]) -> dict[str, Any]:
    plans = {}
    degrees: tuple[int, ...] = (1,)
    recipe = ""
    specs: list[TensorSpec] = []
    for degree in (1, 2, 4, 8):
        if degree > 1 and degree not in degrees:
            continue
        small = _plan(folder, degree, device, dtype, concurrency=1)
        degrees, recipe = small.recipe.tensor_parallel, small.recipe.name
        larger = _plan(folder, degree, device, dtype, concurrency=SCRATCH_CONCURRENCY)
        specs = specs or resolve(small.recipe.manifest)(small.geometry)
        held = {
            name: _held(small, specs, dtype=dtype, form_of=form_of)
            for name, form_of in formats.items()
        }
        plans[degree] = {
            "weights": {name: weights for name, (weights, _) in held.items()},
            "tables": {name: tables for name, (_, tables) in held.items()},
            **_state(small.manifest, larger.manifest),
        }
    return {
        "recipe": recipe,
        "device": device,
        "dtype": dtype,
        "maxContextTokens": small.geometry.max_context_tokens,
        "pool": _pool(small) if device == "cuda" else None,
        "ranks": {str(degree): plan for degree, plan in plans.items()},
    }


def _pool(plan: Any) -> dict[str, int]:
    """Bytes by which the pool of captured graphs is estimated (device/graphs/pool.py)."""
    width = resolve(plan.recipe.state)(plan.geometry, 1).sampling_width
    sizes = PoolSizes(plan.geometry.vocab_size, width, columns=0)
    logit_row, row, context_token = row_bytes(sizes)
    return {
        "fixed": SMALLEST_BYTES,
        "scoredRows": SCORED_ROWS,
        "logitRow": logit_row,
        "row": row,
        "contextToken": context_token,
    }


def _plan(folder: Path, degree: int, device: str, dtype: str, *, concurrency: int):
    return make_plan(
        EngineConfig.model_validate(
            {
                "checkpoint": str(folder),
                "tensor_parallel_size": degree,
                "device": device,
                "dtype": dtype,
                "concurrency": concurrency,
                "context_tokens": 4096,
                "prefill_tokens": 4096,
                "speculation": {"draft_tokens": SCRATCH_DRAFTS},
            }
        )
    )


def _state(small: PreparedManifest, larger: PreparedManifest) -> dict[str, int]:
    """State is affine in slots: null slot, publication and the like are its constant part."""
    one, many = (
        plan.budget.state_bytes - plan.snapshot_rows * plan.snapshot_row_bytes
        for plan in (small, larger)
    )
    slot = -(-(many - one) // (SCRATCH_CONCURRENCY - 1))
    return {
        "slot": slot,
        "snapshot": small.snapshot_row_bytes,
        "fixed": max(0, one - slot),
        "page": -(-small.budget.page_bytes // small.num_pages),
        "scratch": larger.budget.scratch_bytes,
    }


def _held(
    plan: Any, specs: list[TensorSpec], *, dtype: str, form_of: FormOf | None
) -> tuple[int, int]:
    """Bytes of weights without tables, and of tables; `form_of` None = everything dequantised."""

    def held(*, tables: bool) -> int:
        return rank_weight_bytes(
            (spec for spec in specs if spec.table == tables),
            world_size=plan.manifest.world_size,
            element_bytes=DTYPE_BYTES[dtype],
            families=plan.families,
            form_of=form_of,
        )

    return held(tables=False), held(tables=True)


# --- README.md


def readme_text() -> str:
    """The chart's README: what to do first, then every value."""
    lines = [
        "# flare-ray",
        "",
        "Installs the service as a KubeRay `RayService`. Written by `helm/generate.py`; the words",
        "beside a value are its comment in `values.yaml`. Operating it:",
        "[docs/operators/README.md](../../docs/operators/README.md).",
        "",
        "```",
        "cd helm/flare-ray",
        "flare-ray check values-glm-4gpu.yaml",
        "helm install my-model . -f values-glm-4gpu.yaml",
        "```",
        "",
        "| Values file | Runs |",
        "| --- | --- |",
        *(f"| `{path.name}` | {_first_comment(path)} |" for path in values_files()),
        "",
        "| Value | Default | Meaning |",
        "| --- | --- | --- |",
        *(f"| `{path}` | {default} | {words} |" for path, default, words in value_rows()),
    ]
    return "\n".join(lines) + "\n"


def values_files() -> list[Path]:
    """The shipped values files, besides the defaults."""
    return sorted(CHART.glob("values-*.yaml"))


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def value_rows() -> Iterator[tuple[str, str, str]]:
    """Path, default and comment of each explained value."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    stack: list[tuple[int, str]] = []
    words = ""
    for line in text.splitlines():
        if comment := re.fullmatch(r"\s*# -- (.*)", line):
            words = comment.group(1)
        elif key := re.match(r"(\s*)([A-Za-z_][\w./-]*):", line):
            depth = len(key.group(1))
            stack = [entry for entry in stack if entry[0] < depth]
            stack.append((depth, key.group(2)))
            if words:
                path = [name for _, name in stack]
                yield ".".join(path), _default_text(defaults, path), words
            words = ""


def _default_text(defaults: Any, path: list[str]) -> str:
    for key in path:
        defaults = defaults[key]
    if isinstance(defaults, dict) and defaults:
        return ""
    return f"`{json.dumps(defaults)}`"


if __name__ == "__main__":
    main()

"""`inspect` and `plan` on the published sizes, from sparse files and config.json alone (contract:
R10)."""

from __future__ import annotations

import json

import pytest

from flare_ray.cli.inspect import inspect_checkpoint
from flare_ray.cli.plan import plan_text
from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.recipes.declaration import TensorSpec
from flare_ray.recipes.qwen4_exp.geometry import read_geometry
from flare_ray.recipes.qwen4_exp.weights import manifest
from tests.recipes.qwen4_exp.published import published_config
from tests.unit_device.weights.published import write_sparse

VISION_PARAMS, VISION_TENSORS = 448_931_056, 333
PUBLISHED_TENSORS, PUBLISHED_BYTES = 1_658, 359_999_963_128
MIB = 1 << 20
SPECS = manifest(read_geometry(published_config()))


def plain(spec: TensorSpec) -> list:
    return [(spec.name, "I64" if spec.integer else "BF16", spec.shape)]


def w4a16(spec: TensorSpec) -> list:
    """NVFP4 without an activation scale."""
    rows, columns = spec.shape
    return [
        (spec.name, "U8", (rows, columns // 2)),
        (f"{spec.name}_scale", "F8_E4M3", (rows, columns // 16)),
        (f"{spec.name}_scale_2", "F32", ()),
    ]


def vision() -> list:
    size = VISION_PARAMS // VISION_TENSORS
    sizes = [size] * (VISION_TENSORS - 1) + [VISION_PARAMS - size * (VISION_TENSORS - 1)]
    return [(f"model.visual.{i}.weight", "BF16", (n,)) for i, n in enumerate(sizes)]


def test_bfloat16_release_has_the_published_tensors_and_bytes(tmp_path):
    entries = [entry for spec in SPECS if not spec.instead for entry in plain(spec)]
    report = inspect_checkpoint(write_sparse(tmp_path, entries + vision(), published_config()))
    assert report.problems == ()
    assert report.recipe == "qwen3.8-flash"
    assert (report.num_tensors, report.total_bytes) == (PUBLISHED_TENSORS, PUBLISHED_BYTES)
    assert [row.world_size for row in report.ranks] == [1, 2, 4]


def quantised(skipped: list[str]) -> tuple[list, dict]:
    """Entries and config of an export with W4A16 experts, everything else bfloat16; the drafter is
    whole, the target has its first four layers."""
    shallow, entries = published_config(), []
    text = shallow["text_config"]
    text.update(num_hidden_layers=4, layer_types=text["layer_types"][:4])
    for spec in manifest(read_geometry(shallow)):
        if spec.required:
            expert = ".mlp.experts." in spec.name
            entries += w4a16(spec) if expert else plain(spec)
    config = {
        **shallow,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": skipped,
        },
    }
    return entries, config


OTHERS = [
    *("*.linear_attn*", "*.self_attn*", "*shared_expert*", "*hyper_connection*", "lm_head"),
    "*.ple*",
]


def test_w4a16_drafter_has_the_tensors_and_bytes_of_the_source_text(tmp_path):
    entries, config = quantised(OTHERS)
    report = inspect_checkpoint(write_sparse(tmp_path, entries, config))
    assert report.problems == ()
    drafter = [share for share in report.shares if share.family == "drafter"]
    assert sum(share.tensors for share in drafter) == 4_637
    assert sum(share.num_bytes for share in drafter) == 1_596_720_640
    assert report.w4a4 == 0


def test_metadata_may_number_the_drafters_layer_after_the_targets(tmp_path):
    """An ignore list that names the layer so contradicts experts stored quantised."""
    entries, config = quantised([*OTHERS, "mtp.layers.4.mlp.experts*"])
    problems = inspect_checkpoint(write_sparse(tmp_path, entries, config)).problems
    assert len(problems) == 3 * 512
    assert all(line.startswith("mtp.layers.0.mlp.experts.") for line in problems)


def test_a_table_in_fp8_is_refused_by_name(tmp_path):
    """Published quantised exports store it so; the engine does not read that yet."""
    entries = []
    for spec in SPECS:
        if not spec.instead:
            table = ".ngram_embedding.shard_" in spec.name
            entries += [(spec.name, "F8_E4M3", spec.shape)] if table else plain(spec)
    problems = inspect_checkpoint(write_sparse(tmp_path, entries, published_config())).problems
    assert len(problems) == 128
    assert all("this tensor must be one of BF16, F16, F32" in line for line in problems)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plan_counts_pages_and_state_of_the_published_model(tmp_path, size):
    (tmp_path / "config.json").write_text(json.dumps(published_config()))
    config = EngineConfig(
        checkpoint=str(tmp_path),
        tensor_parallel_size=size,
        device="cuda",
        dtype="bfloat16",
        concurrency=1,
        context_tokens=4096,
        eager=True,
        prefix_cache={"enabled": False},
    )
    manifest = make_plan(config).manifest
    kept = 2048 // min(size, 2) + 64
    assert manifest.budget.page_bytes == manifest.num_pages * 64 * 13 * kept
    recurrent = 2 * (108 * MIB + 8 * 1_186_560) // size
    assert recurrent < manifest.budget.state_bytes < recurrent + 20 * MIB
    assert "qwen3.8-flash" in plan_text(manifest)
    if size == 1:
        assert 13 * kept == 27_456

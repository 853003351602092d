"""`inspect`: a report for every folder, whole or broken, and the published releases' figures."""

import json

import pytest

from flare_ray.cli.inspect import MAX_LISTED, inspect_checkpoint
from flare_ray.recipes.declaration import resolve
from flare_ray.recipes.registry import get
from tests.unit_device.weights.published import GLM_CONFIG, fp8_entries, is_fp8, write_sparse

RECIPE = get("glm-5.3-flash")
VISION_PARAMS = 563_627_008
VISION_TENSORS = 347
PUBLISHED_NAMES = 76_108
PUBLISHED_GB = 328.3


def specs_of(config):
    return resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(config))


def tiny_config():
    """Two layers and a drafter with the real schedule's kinds."""
    text = {
        **GLM_CONFIG["text_config"],
        "num_hidden_layers": 4,
        "eos_token_id": [5],
        "hidden_size": 64,
        "vocab_size": 96,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 16,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
    }
    return {**GLM_CONFIG, "text_config": text}


def plain_entries(config):
    return [(s.name, "BF16", s.shape) for s in specs_of(config) if s.required]


def test_published_fp8_release_is_reported_whole(tmp_path):
    """Names, bytes and parameters of the real release, from a sparse file (contract: R10)."""
    specs = [spec for spec in specs_of(GLM_CONFIG) if spec.required]
    entries = [entry for spec in specs for entry in fp8_entries(spec)]
    size = VISION_PARAMS // VISION_TENSORS
    sizes = [size] * (VISION_TENSORS - 1) + [VISION_PARAMS - size * (VISION_TENSORS - 1)]
    entries += [(f"model.visual.{i}.weight", "BF16", (n,)) for i, n in enumerate(sizes)]
    plain = [spec.name.removesuffix(".weight") for spec in specs if not is_fp8(spec)]
    config = {
        **GLM_CONFIG,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [name.replace("language_model.", "") for name in plain],
        },
    }
    report = inspect_checkpoint(write_sparse(tmp_path, entries, config))
    assert report.problems == ()
    assert report.recipe == "glm-5.3-flash"
    assert report.num_tensors == PUBLISHED_NAMES
    assert round(report.total_bytes / 1e9, 1) == PUBLISHED_GB
    assert sum(s.num_bytes for s in report.shares) == report.total_bytes
    assert sum(s.tensors for s in report.shares) == report.num_tensors
    assert {(s.family, s.format) for s in report.shares} == {
        ("target", "BF16"),
        ("target", "F32"),
        ("target", "fp8_block"),
        ("drafter", "BF16"),
        ("drafter", "F32"),
        ("drafter", "fp8_block"),
        ("not loaded", "BF16"),
    }
    assert [row.world_size for row in report.ranks] == [1, 2, 4]
    assert report.ranks[0].stored_bytes + 2 * VISION_PARAMS == report.total_bytes


def test_whole_small_checkpoint_has_no_problems_and_prints_its_sums(tmp_path):
    config = tiny_config()
    report = inspect_checkpoint(write_sparse(tmp_path, plain_entries(config), config))
    assert report.problems == ()
    assert "no problems" in report.text
    assert f"{report.num_tensors:,} tensors in 1 files, {report.total_bytes:,} bytes" in report.text
    assert "drafter" in report.text


def test_missing_and_unknown_tensors_are_problems_and_are_printed(tmp_path):
    config = tiny_config()
    entries = plain_entries(config)
    lost = entries.pop(3)[0]
    entries.append(("stranger[bold].weight", "F32", (2,)))
    report = inspect_checkpoint(write_sparse(tmp_path, entries, config))
    assert len(report.problems) == 2
    for name in (lost, "stranger[bold].weight"):
        assert any(line.startswith(name) for line in report.problems)
        assert name in report.text
    assert "no problems" not in report.text


def test_truncated_file_and_manifest_faults_are_reported_together(tmp_path):
    config = tiny_config()
    entries = plain_entries(config)
    lost = entries.pop(0)[0]
    write_sparse(tmp_path, entries, config)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    problems = inspect_checkpoint(tmp_path).problems
    assert any("truncated" in line for line in problems)
    assert any(line.startswith(lost) for line in problems)


def test_long_lists_are_cut_in_print_only(tmp_path):
    config = tiny_config()
    entries = plain_entries(config) + [(f"extra.{i}", "U8", (1,)) for i in range(MAX_LISTED + 5)]
    report = inspect_checkpoint(write_sparse(tmp_path, entries, config))
    assert len(report.problems) == MAX_LISTED + 5
    assert report.text.count("problem: ") == MAX_LISTED
    assert "... and 5 more problems" in report.text


def test_folder_without_a_checkpoint_gives_a_report_of_what_is_missing(tmp_path):
    report = inspect_checkpoint(tmp_path / "absent")
    assert report.recipe == ""
    assert any("no such folder" in line for line in report.problems)


def test_checkpoint_of_no_recipe_is_a_problem_that_names_the_recipes(tmp_path):
    write_sparse(tmp_path, [("a", "F32", (1,))], {"architectures": ["Stranger"]})
    report = inspect_checkpoint(tmp_path)
    assert report.recipe == ""
    assert any("Stranger" in line and "glm-5.3-flash" in line for line in report.problems)
    assert report.total_bytes == 4


def test_unknown_recipe_name_is_a_problem(tmp_path):
    write_sparse(tmp_path, [("a", "F32", (1,))], tiny_config())
    assert any("nonsense" in p for p in inspect_checkpoint(tmp_path, recipe="nonsense").problems)


def test_damaged_geometry_is_a_problem_and_what_is_stored_is_still_counted(tmp_path):
    config = tiny_config()
    write_sparse(tmp_path, plain_entries(config), config)
    config["text_config"]["hidden_size"] = "wide"
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_checkpoint(tmp_path)
    assert any("hidden_size" in line for line in report.problems)
    assert report.shares == ()
    assert report.total_bytes > 0


@pytest.mark.parametrize("kv", [{"kv_cache_quant_algo": "FP8"}, {}])
def test_declared_kv_cache_and_activation_scales_are_told(tmp_path, kv):
    config = tiny_config()
    entries = []
    for spec in specs_of(config):
        if not spec.required:
            continue
        if ".experts." not in spec.name:
            entries.append((spec.name, "BF16", spec.shape))
            continue
        rows, columns = spec.shape
        entries += [
            (spec.name, "U8", (rows, columns // 2)),
            (spec.name + "_scale", "F8_E4M3", (rows, columns // 16)),
            (spec.name + "_scale_2", "F32", ()),
            (spec.name.removesuffix("weight") + "input_scale", "F32", ()),
        ]
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["*self_attn*", "*shared_experts*", *(f"model.layers.{i}.mlp.{p}_proj"
                   for i in range(3) for p in ("gate", "up", "down"))],
        **kv,
    }  # fmt: skip
    report = inspect_checkpoint(write_sparse(tmp_path, entries, config))
    assert report.problems == ()
    assert report.w4a4 == 12
    assert "W4A4" in report.text
    assert report.kv_cache == ("fp8" if kv else "")
    assert ("KV cache of type fp8" in report.text) == bool(kv)

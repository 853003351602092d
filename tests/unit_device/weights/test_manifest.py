"""Every listed tensor against the stored ones: each fault named, families kept apart."""

import os

import pytest
import torch

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.manifest import check_manifest, open_validated, validate
from flare_ray.errors import CheckpointError, ContractViolation
from flare_ray.recipes.declaration import TensorSpec
from tests.unit_device.weights.synthetic import (
    CONFIGS,
    DOWN,
    DRAFT_DOWN,
    DRAFT_HEAD,
    DRAFT_NORM,
    GATE,
    HEAD,
    NORM,
    O_PROJ,
    SPEC,
    SPECS,
    STORE,
    UP,
    build,
    store_fp8_compressed,
    store_modelopt,
)

FORMS = tuple(CONFIGS)


def check(tmp_path, made, **rules):
    return check_manifest(open_checkpoint(made.write(tmp_path)), SPECS, **rules)


def only_problem(tmp_path, made, **rules):
    _, problems = check(tmp_path, made, **rules)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_whole_checkpoint_of_every_form_validates(tmp_path, form, shards):
    made = build(form, shards=shards)
    index = open_checkpoint(made.write(tmp_path))
    validated = validate(index, SPECS)
    assert validated.weights.keys() == made.values.keys()
    assert validated.total_bytes == index.total_bytes


def test_damaged_file_does_not_hide_a_missing_tensor(tmp_path):
    made = build("bf16", shards=3)
    folder = made.write(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[0]
    extended = [*SPECS, TensorSpec("absent.weight", (4, 4), "target")]
    os.truncate(shard, shard.stat().st_size - 2)
    with pytest.raises(CheckpointError) as error:
        open_validated(folder, extended)
    truncated, missing = error.value.problems
    assert "truncated" in truncated and shard.name in truncated
    assert missing.startswith("absent.weight: missing")


def test_folder_without_weights_is_refused_for_that_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as error:
        open_validated(tmp_path, SPECS)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("bf16", {WeightFormat.PLAIN: 9}),
        ("fp8", {WeightFormat.PLAIN: 5, WeightFormat.FP8_BLOCK: 4}),
        ("modelopt", {WeightFormat.PLAIN: 6, WeightFormat.NVFP4_MODELOPT: 3}),
        ("compressed", {WeightFormat.PLAIN: 5, WeightFormat.NVFP4_COMPRESSED: 4}),
        (
            "mixed",
            {WeightFormat.PLAIN: 5, WeightFormat.NVFP4_COMPRESSED: 3, WeightFormat.FP8_BLOCK: 1},
        ),
    ],
)
def test_format_of_every_tensor_is_read_from_the_tensors(tmp_path, form, expected):
    validated, problems = check(tmp_path, build(form))
    assert not problems
    assert validated.formats() == expected


def test_activation_scale_marks_w4a4(tmp_path):
    validated, _ = check(tmp_path, build("modelopt"))
    assert validated.weights[GATE].quantises_activations
    validated, _ = check(tmp_path, build("compressed"))
    assert not validated.weights[GATE].quantises_activations


def test_missing_tensor_is_named_with_its_shape(tmp_path):
    made = build("bf16")
    del made.tensors[NORM]
    assert only_problem(tmp_path, made) == f"{NORM}: missing; expected [96]"


def test_unlisted_tensor_is_named(tmp_path):
    made = build("bf16")
    made.tensors["model.stranger.weight"] = torch.zeros(2, 3)
    line = only_problem(tmp_path, made)
    assert line.startswith("model.stranger.weight: not in the manifest (F32 [2, 3]")


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    made = build("bf16")
    made.tensors[UP] = torch.zeros(95, 64, dtype=torch.bfloat16)
    assert only_problem(tmp_path, made) == f"{UP}: shape [95, 64], expected [96, 64]"


def test_transposed_tensor_of_equal_bytes_is_named(tmp_path):
    made = build("bf16")
    made.tensors[UP] = made.tensors[UP].T.contiguous()
    assert only_problem(tmp_path, made) == f"{UP}: shape [64, 96], expected [96, 64]"


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint8])
def test_mistyped_tensor_is_named(tmp_path, dtype):
    made = build("bf16")
    made.tensors[NORM] = torch.zeros(96, dtype=dtype)
    line = only_problem(tmp_path, made)
    assert NORM in line
    assert "BF16" in line


def test_every_problem_is_collected(tmp_path):
    made = build("bf16")
    del made.tensors[NORM], made.tensors[DRAFT_NORM]
    made.tensors[UP] = torch.zeros(1, dtype=torch.int8)
    made.tensors["extra"] = torch.zeros(1)
    _, problems = check(tmp_path, made)
    for name in (NORM, DRAFT_NORM, UP, "extra"):
        assert any(name in line for line in problems)
    with pytest.raises(CheckpointError) as caught:
        validate(open_checkpoint(tmp_path), SPECS)
    assert caught.value.problems == problems


def test_tolerated_prefix_admits_unlisted_tensors_and_nothing_else(tmp_path):
    made = build("bf16")
    made.tensors["model.visual.patch.weight"] = torch.zeros(1)
    made.tensors["model.visuals.weight"] = torch.zeros(1)
    line = only_problem(tmp_path, made, tolerated_prefixes=("model.visual.",))
    assert line.startswith("model.visuals.weight")


def test_optional_tensor_may_be_absent_or_present_but_not_misshapen(tmp_path):
    made = build("bf16")
    made.tensors[DRAFT_HEAD] = torch.zeros(64, 96)
    validated, problems = check(tmp_path, made)
    assert not problems
    assert DRAFT_HEAD in validated.weights
    made.tensors[DRAFT_HEAD] = torch.zeros(64, 97)
    assert DRAFT_HEAD in only_problem(tmp_path, made)


@pytest.mark.parametrize(
    ("family", "own", "other"), [("target", NORM, DRAFT_NORM), ("drafter", DRAFT_NORM, NORM)]
)
def test_one_family_is_judged_alone_and_the_other_is_no_stranger(tmp_path, family, own, other):
    made = build("mixed")
    made.tensors[other] = torch.zeros(1, dtype=torch.int32)
    validated, problems = check(tmp_path, made, families=(family,))
    assert not problems
    assert {spec.family for spec in SPECS if spec.name in validated.weights} == {family}
    del made.tensors[own]
    assert own in only_problem(tmp_path, made, families=(family,))


def test_manifest_that_lists_a_tensor_twice_is_our_own_fault(tmp_path):
    index = open_checkpoint(build("bf16").write(tmp_path))
    with pytest.raises(ContractViolation, match=NORM):
        validate(index, (*SPECS, TensorSpec(NORM, (96,), "drafter")))


# Parts of quantised tensors.


@pytest.mark.parametrize(
    ("form", "name", "part"),
    [
        ("modelopt", GATE, "_scale"),
        ("modelopt", GATE, "_scale_2"),
        ("compressed", GATE, "_scale"),
        ("compressed", GATE, "_global_scale"),
        ("fp8", GATE, "_scale_inv"),
    ],
)
def test_missing_companion_is_named(tmp_path, form, name, part):
    made = build(form)
    del made.tensors[name + part]
    lines = check(tmp_path, made)[1]
    assert any(line.startswith(f"{name}{part}: missing") for line in lines), lines


@pytest.mark.parametrize(
    ("form", "part", "wrong", "fragment"),
    [
        ("modelopt", "", torch.zeros(96, 31, dtype=torch.uint8), "[96, 31], expected [96, 32]"),
        ("modelopt", "_scale", torch.zeros(96, 4), "type F32, expected F8_E4M3"),
        ("modelopt", "_scale_2", torch.zeros(2), "shape [2], expected []"),
        ("modelopt", "_scale_2", torch.zeros((), dtype=torch.bfloat16), "type BF16, expected F32"),
        ("compressed", "_packed", torch.zeros(96, 32, dtype=torch.int8), "type I8, expected U8"),
        ("compressed", "_global_scale", torch.zeros(96), "shape [96], expected []"),
        ("fp8", "_scale_inv", torch.zeros(6, 1), "shape [6, 1], expected [6, 2]"),
        ("fp8", "_scale_inv", torch.zeros(6, 2, dtype=torch.bfloat16), "type BF16, expected F32"),
        ("fp8", "", torch.zeros(96, 64, dtype=torch.float8_e5m2), "type F8_E5M2"),
        ("fp8", "", torch.zeros(64, 96, dtype=torch.float8_e4m3fn), "shape [64, 96]"),
    ],
)
def test_wrong_part_is_named(tmp_path, form, part, wrong, fragment):
    made = build(form)
    made.tensors[GATE + part] = wrong
    line = only_problem(tmp_path, made)
    assert line.startswith(GATE + part)
    assert fragment in line


def test_wrong_activation_scale_is_named(tmp_path):
    made = build("modelopt")
    name = GATE.removesuffix("weight") + "input_scale"
    made.tensors[name] = torch.zeros(96)
    assert only_problem(tmp_path, made).startswith(name)


def test_scales_without_their_weight_are_named(tmp_path):
    made = build("fp8")
    del made.tensors[GATE]
    line = only_problem(tmp_path, made)
    assert GATE in line
    assert "its weight is missing" in line


def test_scale_of_another_format_beside_a_tensor_is_named_as_unlisted(tmp_path):
    made = build("modelopt")
    made.tensors[GATE + "_scale_inv"] = torch.zeros(6, 2)
    assert only_problem(tmp_path, made).startswith(GATE + "_scale_inv: not in the manifest")


def test_plain_weight_beside_a_scale_is_refused(tmp_path):
    made = build("modelopt")
    made.tensors[O_PROJ + "_scale"] = torch.zeros(96, 4)
    lines = check(tmp_path, made)[1]
    assert any(O_PROJ in line and "beside a scale" in line for line in lines)


def test_weight_stored_in_two_forms_is_refused(tmp_path):
    made = build("compressed")
    made.tensors[GATE] = torch.zeros(96, 64)
    assert "stored both" in only_problem(tmp_path, made)


def test_tensor_that_may_not_be_quantised_is_refused_in_packed_form(tmp_path):
    made = build("fp8")
    made.tensors[NORM] = torch.zeros(96, dtype=torch.float8_e4m3fn)
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{NORM}: stored quantised")


def test_block_scales_named_weight_scale_are_read_as_fp8_block(tmp_path):
    made = build("mixed")
    for suffix in ("", "_scale_inv"):
        del made.tensors[DRAFT_DOWN + suffix]
    stored, _ = store_fp8_compressed(DRAFT_DOWN, torch.ones(SPEC[DRAFT_DOWN].shape))
    made.tensors |= stored
    validated, problems = check(tmp_path, made)
    assert not problems
    assert validated.weights[DRAFT_DOWN].format is WeightFormat.FP8_BLOCK


# Formats refused by name.


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_refused_by_name(tmp_path, scale_dtype):
    made = build("fp8")
    del made.tensors[GATE + "_scale_inv"]
    made.tensors[GATE + "_scale"] = torch.ones(96, 2).to(scale_dtype)
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{GATE}: MXFP8")
    assert "use an FP8-block, NVFP4 or BF16 export" in line


def test_mxfp4_is_refused_by_name(tmp_path):
    made = build("compressed")
    made.tensors[GATE + "_scale"] = torch.ones(96, 2, dtype=torch.uint8)
    del made.tensors[GATE + "_global_scale"]
    assert any("MXFP4" in line and GATE in line for line in check(tmp_path, made)[1])


@pytest.mark.parametrize("shape", [(), (1,), (96, 1)])
def test_fp8_scaled_per_tensor_or_channel_is_refused_by_name(tmp_path, shape):
    made = build("fp8")
    del made.tensors[GATE + "_scale_inv"]
    made.tensors[GATE + "_scale"] = torch.ones(shape)
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{GATE}: FP8 with scales of shape")


def test_compressed_block_scales_are_refused_by_name(tmp_path):
    made = build("modelopt")
    scale = made.tensors.pop(GATE + "_scale")
    made.tensors[GATE + "_scale.nvfp4_csf_fixed"] = scale.view(torch.uint8)
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{GATE}: its block scales are CSF-compressed")
    assert "use an export" in line


def test_packed_integers_are_refused(tmp_path):
    made = build("compressed")
    made.tensors[GATE + "_packed"] = torch.zeros(96, 8, dtype=torch.int32)
    made.tensors[GATE + "_shape"] = torch.zeros(2, dtype=torch.int64)
    lines = check(tmp_path, made)[1]
    assert any(line.startswith(GATE + "_packed: type I32") for line in lines)
    assert any(line.startswith(GATE + "_shape: not in the manifest") for line in lines)


def test_nvfp4_with_columns_that_are_no_whole_groups_is_refused(tmp_path):
    specs = (TensorSpec("a.weight", (8, 24), "target", quantisable=True),)
    made = build("modelopt")
    made.tensors = {
        "a.weight": torch.zeros(8, 12, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(8, 1).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.ones(()),
    }
    _, problems = check_manifest(open_checkpoint(made.write(tmp_path)), specs)
    assert "no multiple of 16" in problems[0]


# The declaration against the tensors.


def test_quantised_tensors_without_any_declaration_are_refused(tmp_path):
    made = build("fp8")
    del made.config["quantization_config"]
    # Without a declared block the usual one is expected, so use tensors that fit either.
    name = GATE
    for key in [k for k in made.tensors if k.endswith("_scale_inv")]:
        rows, columns = SPEC[key.removesuffix("_scale_inv")].shape
        made.tensors[key] = torch.ones(-(-rows // 128), -(-columns // 128))
    lines = check(tmp_path, made)[1]
    assert any(name in line and "declares no quantisation" in line for line in lines)
    assert len(lines) == 4


def test_quantised_tensor_on_the_skip_list_is_refused(tmp_path):
    made = build("fp8")
    made.config["quantization_config"]["modules_to_not_convert"].append(
        "model.layers.0.mlp.up_proj"
    )
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{UP}: stored as fp8_block")
    assert "not quantised" in line


def test_quantised_tensor_of_another_kind_than_declared_is_refused(tmp_path):
    made = build("modelopt")
    made.config["quantization_config"] = {
        **CONFIGS["fp8"],
        "modules_to_not_convert": ["lm_head", "self_attn"],
    }
    lines = check(tmp_path, made)[1]
    assert {line.split(":")[0] for line in lines} == {GATE, UP, DOWN}
    assert all("declares fp8_block" in line for line in lines)


def test_quantised_tensor_outside_the_targets_is_refused(tmp_path):
    made = build("compressed")
    group = made.config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = ["re:.*mlp.(gate|up)_proj"]
    lines = check(tmp_path, made)[1]
    assert {line.split(":")[0] for line in lines} == {DOWN, DRAFT_DOWN}


def test_plain_target_tensor_declared_quantised_is_refused(tmp_path):
    made = build("fp8")
    del made.tensors[GATE + "_scale_inv"]
    made.tensors[GATE] = torch.zeros(96, 64, dtype=torch.bfloat16)
    line = only_problem(tmp_path, made)
    assert line.startswith(f"{GATE}: quantization_config declares fp8_block")
    assert "stores BF16" in line


def test_plain_drafter_tensor_declared_quantised_is_trusted_and_noted(tmp_path):
    validated, problems = check(tmp_path, build("modelopt"))
    assert not problems
    assert validated.notices == (f"{DRAFT_DOWN}: declared nvfp4, stored BF16; read as BF16",)


def test_mixed_precision_trusts_the_tensors_except_against_the_skip_list(tmp_path):
    made = build("mixed")
    for name, storage in ((UP, "plain"), (GATE, "fp8")):
        for key in [k for k in made.tensors if k.startswith(name)]:
            del made.tensors[key]
        made.tensors |= STORE[storage](name, torch.ones(SPEC[name].shape))[0]
    assert check(tmp_path, made)[1] == ()
    made.tensors |= store_modelopt(O_PROJ, torch.ones(96, 64))[0]
    assert only_problem(tmp_path, made).startswith(f"{O_PROJ}: stored as nvfp4_modelopt")


def test_mixed_precision_that_declares_one_kind_accepts_the_other(tmp_path):
    made = build("mixed")
    del made.config["quantization_config"]["config_groups"]["group_1"]
    # Without a declared block the usual one is expected.
    made.tensors[DRAFT_DOWN + "_scale_inv"] = torch.ones(1, 1)
    assert check(tmp_path, made)[1] == ()


def test_scales_of_a_declared_kv_cache_are_no_strangers(tmp_path):
    made = build("modelopt")
    made.tensors["model.language_model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    assert "k_scale: not in the manifest" in only_problem(tmp_path, made)
    made.config["quantization_config"]["kv_cache_quant_algo"] = "FP8"
    assert check(tmp_path, made)[1] == ()


def test_head_on_skip_list_without_prefix_is_recognised(tmp_path):
    made = build("fp8")
    made.config["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    assert only_problem(tmp_path, made).startswith(HEAD)

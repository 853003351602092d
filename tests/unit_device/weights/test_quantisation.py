"""Declarations: what each kind of quantization_config says, and how its module lists match."""

import pytest

from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.quantisation import (
    ModulePatterns,
    check_kv_cache,
    declared_kv_cache,
    read_declaration,
)
from flare_ray.errors import CheckpointError
from tests.unit_device.weights.synthetic import BLOCK, CONFIGS, build

MODULE = "model.language_model.layers.10.mlp.gate_proj"


@pytest.mark.parametrize(
    "entry",
    [
        MODULE,
        "model.layers.10.mlp.gate_proj",
        "language_model.model.layers.10.mlp.gate_proj",
        "layers.10.mlp",
        "mlp.gate_proj",
        "gate_proj",
        "model.layers.10",
        "model.language_model.layers.10*",
        "*.mlp*",
        "*mlp.gate_proj",
        "model.layers.1?.mlp",
        "re:.*mlp.gate_proj",
        "re:model.layers.10.*",
        "re:model.language_model.layers.*",
    ],
)
def test_pattern_matches_the_module_in_every_spelling(entry):
    assert ModulePatterns(["lm_head", entry]).matches(MODULE)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.1",
        "model.layers.1.mlp.gate_proj",
        "layers.100",
        "mlp.gate",
        "gate",
        "proj",
        "model",
        "",
        "model.language_model",
        "*.mlp.gate",
        "model.layers.1?.self_attn*",
        "re:mlp.gate_proj",
        "re:.*layers.1.mlp.*",
    ],
)
def test_pattern_of_a_neighbour_does_not_match(entry):
    assert not ModulePatterns(["lm_head", entry]).matches(MODULE)


def test_no_declaration_declares_nothing():
    declaration, problems = read_declaration({})
    assert not problems
    assert declaration.kinds == frozenset()


@pytest.mark.parametrize(
    ("form", "kinds", "mixed"),
    [
        ("fp8", {"fp8_block"}, False),
        ("modelopt", {"nvfp4"}, False),
        ("compressed", {"nvfp4"}, False),
        ("mixed", {"nvfp4", "fp8_block"}, True),
    ],
)
def test_declared_kinds_of_every_form(form, kinds, mixed):
    declaration, problems = read_declaration(CONFIGS[form])
    assert not problems
    assert (set(declaration.kinds), declaration.mixed) == (kinds, mixed)


@pytest.mark.parametrize("form", ["fp8", "mixed"])
def test_declared_block_is_read(form):
    assert read_declaration(CONFIGS[form])[0].block == BLOCK


def test_modelopt_groups_without_algorithm_are_read_as_groups():
    config = {**CONFIGS["compressed"], "quant_method": "modelopt"}
    assert read_declaration(config)[0].kinds == {"nvfp4"}


def test_mixed_modelopt_map_names_what_is_not_supported():
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "a.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "a.q_proj": {"quant_algo": "MXFP8"},
            "a.o_proj": {"quant_algo": "MXFP8"},
            "b": {"quant_algo": "FP8_PB_WO"},
            "c.table": {"quant_algo": "FP8"},
        },
    }
    declaration, problems = read_declaration(config)
    assert declaration.mixed
    assert declaration.kinds == {"nvfp4", "fp8_block", "fp8_tensor"}
    assert len(problems) == 1
    assert "MXFP8 for 2 modules (a.q_proj ...)" in problems[0]


def test_fp8_with_one_scale_is_refused_for_a_whole_model():
    _declaration, problems = read_declaration({"quant_method": "modelopt", "quant_algo": "FP8"})
    assert problems == ("quantization_config: quant_algo FP8 is not supported",)


WEIGHTS = CONFIGS["compressed"]["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({"quant_method": "gptq"}, "'gptq' is not supported"),
        ({"bits": 4}, "'' is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo FP8"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo MXFP8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size 32",
        ),
        ({"quant_method": "modelopt"}, "neither quant_algo nor config_groups"),
        ({"quant_method": "compressed-tensors"}, "neither quant_algo nor config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
            "g declares weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {**WEIGHTS, "type": "int"}}},
            },
            "g declares weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": WEIGHTS, "targets": "Linear"}},
            },
            "g.targets is 'Linear'",
        ),
        ({**CONFIGS["fp8"], "ignore": "lm_head"}, "ignore is 'lm_head'"),
        ({**CONFIGS["fp8"], "ignore": ["re:("]}, "no regular expression"),
    ],
)
def test_declaration_that_cannot_be_honoured_is_named(config, fragment):
    _, problems = read_declaration(config)
    assert any(fragment in line and "quantization_config" in line for line in problems), problems


def test_null_skip_list_is_empty():
    declaration, problems = read_declaration({**CONFIGS["fp8"], "modules_to_not_convert": None})
    assert not problems
    assert not declaration.skipped.matches("lm_head")


KV_FORMS = [
    {"kv_cache_quant_algo": "FP8"},
    {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    {"kv_cache_scheme": "fp8"},
]


@pytest.mark.parametrize("extra", KV_FORMS)
def test_declared_kv_cache_is_reported(extra):
    assert declared_kv_cache({**CONFIGS["modelopt"], **extra}) == "fp8"


@pytest.mark.parametrize("extra", [{}, {"kv_cache_scheme": None}, {"kv_cache_quant_algo": None}])
def test_no_kv_cache_declaration_is_reported_as_empty(extra):
    assert declared_kv_cache({**CONFIGS["modelopt"], **extra}) == ""


def test_declared_kv_cache_is_refused_until_the_deployment_states_a_type(tmp_path):
    made = build("modelopt")
    made.config["quantization_config"]["kv_cache_quant_algo"] = "FP8"
    index = open_checkpoint(made.write(tmp_path))
    with pytest.raises(CheckpointError, match="kv_dtype: bfloat16"):
        check_kv_cache(index, kv_dtype=None)
    line = check_kv_cache(index, kv_dtype="bf16")
    assert "fp8" in line
    assert "bf16" in line


def test_checkpoint_without_kv_declaration_needs_no_statement(tmp_path):
    index = open_checkpoint(build("modelopt").write(tmp_path))
    assert check_kv_cache(index, kv_dtype=None) == ""

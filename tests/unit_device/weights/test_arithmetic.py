"""Declared arithmetic that the engine does not run: refused by name, or named in the log."""

import json

import pytest

from flare_ray.config import EngineConfig
from flare_ray.device.weights.arithmetic import check_arithmetic
from flare_ray.device.weights.index import open_checkpoint
from flare_ray.device.weights.manifest import validate
from flare_ray.errors import CheckpointError
from tests.unit_device.weights.synthetic import SPECS, build


def notices_of(folder, **answers):
    index = open_checkpoint(folder)
    return check_arithmetic(index, validate(index, SPECS), **answers)


def test_four_bit_activations_need_an_answer(tmp_path):
    folder = build("modelopt").write(tmp_path)
    with pytest.raises(CheckpointError, match="quantised_activations: never"):
        notices_of(folder, kv_dtype=None, quantised_activations="as_declared")
    lines = notices_of(folder, kv_dtype=None, quantised_activations="never")
    assert any("W4A16" in line for line in lines)


def test_plain_checkpoint_needs_no_answer(tmp_path):
    folder = build("bf16").write(tmp_path)
    assert notices_of(folder, kv_dtype=None, quantised_activations="as_declared") == ()


def test_fp8_cache_declaration_needs_an_answer(tmp_path):
    made = build("fp8")
    made.config["quantization_config"]["kv_cache_scheme"] = "fp8"
    folder = made.write(tmp_path)
    with pytest.raises(CheckpointError, match="kv_dtype"):
        notices_of(folder, kv_dtype=None, quantised_activations="as_declared")
    lines = notices_of(folder, kv_dtype="bfloat16", quantised_activations="as_declared")
    assert any("bfloat16 is used instead" in line for line in lines)


def test_cache_type_other_than_the_engines_is_refused():
    with pytest.raises(ValueError, match="kv_dtype float32 differs from dtype bfloat16"):
        EngineConfig.model_validate(json.loads('{"checkpoint": "x", "kv_dtype": "float32"}'))

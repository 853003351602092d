"""The quantiser: what it writes reads back exactly, in bfloat16 as in float32."""

import json

import pytest
import torch
from safetensors.torch import save_file

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.powers import power_of_two_above
from flare_ray.device.weights.loader import RankWeights, Split
from flare_ray.device.weights.manifest import open_validated
from flare_ray.device.weights.quantiser import (
    declaration_of,
    dequantise_tensors,
    quantise_tensors,
    rounded,
)
from flare_ray.recipes.declaration import COLUMNS, ROWS, TensorSpec

FORMS = (WeightFormat.FP8_BLOCK, WeightFormat.NVFP4_MODELOPT)
LARGEST_ERROR = {WeightFormat.FP8_BLOCK: 0.04, WeightFormat.NVFP4_MODELOPT: 0.13}
"""Relative error of Gaussian matrices; measured 0.026 and 0.095."""


def gaussian(seed, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.06


@pytest.mark.parametrize("form", FORMS)
def test_rounded_weights_are_exact_in_bfloat16_and_close(form):
    weight = gaussian(1, 200, 256)
    value = rounded(weight, form)
    assert torch.equal(value, value.bfloat16().float())
    assert (value - weight).norm() / weight.norm() < LARGEST_ERROR[form]


@pytest.mark.parametrize("form", FORMS)
def test_rounding_twice_changes_nothing(form):
    once = rounded(gaussian(2, 128, 128), form)
    assert torch.equal(rounded(once, form), once)


@pytest.mark.parametrize("value", [2.0**-30, 0.75, 1.0, 1.0000001, 3.0, 448.0])
def test_power_of_two_above_is_the_smallest(value):
    x = torch.tensor(value)
    power = power_of_two_above(x)
    assert power / 2 < x <= power
    assert torch.frexp(power).mantissa == 0.5


def test_form_without_a_quantiser_is_refused():
    with pytest.raises(ValueError, match="mxfp4"):
        rounded(gaussian(3, 32, 32), WeightFormat.MXFP4)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loader_reads_slices_of_what_was_written(tmp_path, world):
    tensors = {
        "a.proj.weight": gaussian(4, 512, 256),
        "b.experts.0.down_proj.weight": gaussian(5, 256, 128),
        "c.dense.weight": gaussian(6, 256, 256),
        "c.norm.weight": torch.ones(256),
    }
    specs = [
        TensorSpec("a.proj.weight", (512, 256), "target", quantisable=True, shard_dim=ROWS),
        TensorSpec(
            "b.experts.0.down_proj.weight",
            (256, 128),
            "target",
            quantisable=True,
            shard_dim=COLUMNS,
        ),
        TensorSpec("c.dense.weight", (256, 256), "target", quantisable=True, shard_dim=COLUMNS),
        TensorSpec("c.norm.weight", (256,), "target"),
    ]

    def choice(name, tensor):
        if tensor.dim() != 2:
            return WeightFormat.PLAIN
        return WeightFormat.NVFP4_MODELOPT if ".experts." in name else WeightFormat.FP8_BLOCK

    stored = quantise_tensors(tensors, choice)
    save_file(stored, tmp_path / "model.safetensors")
    config = {"quantization_config": declaration_of(tensors, choice)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index, validated = open_validated(tmp_path, specs)
    whole = dequantise_tensors(stored, torch.float32)
    assert validated.weights["a.proj.weight"].format is WeightFormat.FP8_BLOCK
    weights = RankWeights(index, specs, device="cpu", dtype=torch.float32)
    for spec in specs:
        for rank in range(world):
            split = None if spec.shard_dim is None else Split(spec.shard_dim, rank, world)
            want = whole[spec.name]
            want = want if split is None else want.chunk(world, split.dim)[rank]
            assert torch.equal(weights.tensor(spec.name, split=split), want), (spec.name, rank)

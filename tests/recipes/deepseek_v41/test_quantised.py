"""Checkpoints in the release's formats: FP8 and FP4 weights with power-of-two scales, and products
whose inputs are rounded (contract: R5)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_ray.cli.inspect import inspect_checkpoint
from flare_ray.device.parallel.groups import run_ranks
from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4
from flare_ray.errors import CheckpointError
from tests.recipes.deepseek_v41.test_target import LOGITS_ATOL
from tests.recipes.parity.test_target import largest_error
from tests.support.deepseek_oracle import DeepseekOracle, unpacked
from tests.support.deepseek_tiny import write_quantised
from tests.support.recipe_driver import RecipeDriver

LENGTH = 24
"""Rows before a rounded value of this checkpoint lies so near a half-way point that a sum in
another order moves it; beyond windows of 16 and selections of 8."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_quantised(tmp_path_factory.mktemp("quantised"), "packed")


@pytest.fixture(scope="module")
def sequence(folder):
    reference = DeepseekOracle(folder)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, reference.text["vocab_size"] - 8, (LENGTH,), generator=generator)
    return tokens.tolist(), reference.run(tokens.tolist())


def prefilled(folder, tokens, comm=None) -> torch.Tensor:
    torch.set_num_threads(1)
    driver = RecipeDriver(folder, comm, slots=2, num_pages=8)
    return driver.prefill([driver.open(0, [3, 5])], [tokens])[0]


def test_logits_equal_the_equations_with_unpacked_weights_and_rounded_inputs(folder, sequence):
    tokens, oracle = sequence
    assert largest_error(prefilled(folder, tokens), oracle.logits) <= LOGITS_ATOL


def test_rounding_of_inputs_shows_in_the_logits(folder, sequence):
    tokens, oracle = sequence
    reference = DeepseekOracle(folder)
    reference.packed = set()
    without = reference.run(tokens)
    assert largest_error(without.logits, oracle.logits) > 100 * LOGITS_ATOL


def test_ranks_read_their_parts_of_packed_weights(folder, sequence):
    tokens, oracle = sequence
    results = run_ranks(2, lambda comm: prefilled(folder, tokens, comm))
    assert largest_error(results[0], oracle.logits) <= LOGITS_ATOL
    assert torch.equal(results[0], results[1])


def test_inspect_finds_every_tensor_and_the_exact_bytes(folder):
    report = inspect_checkpoint(folder)
    assert report.problems == ()
    assert report.ranks[0].stored_bytes == report.total_bytes
    assert {share.format for share in report.shares} >= {"fp8_block", "mxfp4"}


@pytest.mark.parametrize(
    ("drop", "part"),
    [
        ("layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.weight"),
        ("mtp.0.ffn.experts.1.w2.scale", "mtp.0.ffn.experts.1.w2.weight"),
        ("layers.1.engram.embed.scale", "layers.1.engram.embed.weight"),
    ],
)
def test_a_missing_scale_is_named(folder, tmp_path, drop, part):
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    assert any(part in problem for problem in inspect_checkpoint(tmp_path).problems)


def test_experts_of_another_declared_type_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["expert_dtype"] = "fp8"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        RecipeDriver(tmp_path)
    assert any("stored as mxfp4" in problem for problem in caught.value.problems)


def test_mxfp4_codes_unpack_to_the_nearest_values():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    parts = quantise_mxfp4(weight)
    value = parts.dequantise(torch.float32)
    assert torch.equal(value, unpacked(parts.packed, parts.scale))
    assert torch.equal(value, parts.dequantise(torch.bfloat16).float())
    widest = parts.scale.repeat_interleave(32, 1)
    assert bool(((value - weight).abs() <= widest + 1e-6).all())

"""Seeded random Qwen checkpoints of a few hundred kilobytes, in published names and spellings.

Tensors are drawn by what their name says they are, each from its own stream, so that adding one
never changes another. Scales are chosen so that every block matters: norms away from their stored
zero, decays from slow to fast, gates away from 0 and 1.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4
from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.qwen4_exp.geometry import Geometry
from flare_ray.recipes.qwen4_exp.recipe import RECIPE
from flare_ray.recipes.qwen4_exp.weights import hash_prefix

EOS = 1

_COMMON: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "indexer_kv_heads": 1,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "seed": 1234,
}


def _rope(factor: float, sections: list[int]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": factor,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }


def _layers(kinds: str) -> dict[str, Any]:
    names = {"G": "linear_attention", "A": "full_attention"}
    return {"num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}


def _fused() -> dict[str, Any]:
    """Experts in two tensors a layer; fewer key heads than ranks, wide values, a shared expert of
    twice the routed width."""
    return {
        **_COMMON,
        **_layers("GGAGA"),
        "vocab_size": 192,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": _rope(0.5, [2, 1, 1]),
        "output_gate_type": "sigmoid",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hc_count": 4,
        "hc_lowrank": 12,
        "indexer_n_heads": 16,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ple_embed_dim": 48,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 64,
        "split_ngram_parts": 4,
    }


def _single() -> dict[str, Any]:
    """Experts matrix by matrix, many of them; attention first, groups of eight, two streams, two
    layers of n-grams up to order four, as many key heads as ranks."""
    return {
        **_COMMON,
        **_layers("AGAG"),
        "vocab_size": 128,
        "hidden_size": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rope_parameters": _rope(0.34, [1, 1, 0]),
        "output_gate_type": "silu",
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 20,
        "num_experts_per_tok": 3,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 12,
        "indexer_head_dim": 20,
        "indexer_budget": 48,
        "indexer_compress_ratio": 8,
        "ple_layer_ids": [2, 4],
        "ple_embed_dim": 36,
        "ple_conv_kernel_size": 3,
        "ngram_size": 4,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 61,
        "make_ngram_vocab_size_divisible_by": 32,
        "split_ngram_parts": 2,
    }


def _long() -> dict[str, Any]:
    """As fused, but two pages of context are selected whole: dense attention first, then selection
    over groups that the dense passes wrote."""
    return {**_fused(), "indexer_budget": 128}


TEXTS = {"qwen-fused": _fused, "qwen-single": _single, "qwen-long": _long}
SEEDS = {"qwen-fused": 3, "qwen-single": 5, "qwen-long": 3}
"""Chosen so that no row's last selected and first left-out group come closer than float32 can tell
apart; the oracle asserts it."""


def config_of(name: str) -> dict[str, Any]:
    """config.json of a named variant."""
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "float32",
        "text_config": TEXTS[name](),
    }


def sequence(vocabulary: int, length: int) -> Tensor:
    """[length] tokens with the reset token alone, in a run, and within any short prompt."""
    tokens = torch.randint(3, vocabulary - 8, (length,), generator=torch.Generator().manual_seed(3))
    tokens[[2, 9, 24, 25, 26, 60, 63, 64, 90, 92]] = EOS
    return tokens


def write_checkpoint(folder: Path, name: str) -> Path:
    """Write a variant's config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    geometry: Geometry = resolve(RECIPE.geometry)(config)
    single = name == "qwen-single"
    specs: list[TensorSpec] = resolve(RECIPE.manifest)(geometry)
    tensors = {
        spec.name: draw(spec, SEEDS[name])
        for spec in specs
        if not spec.integer and (spec.required if single else not spec.instead)
    }
    tensors.update(hash_constants(geometry))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_quantised(folder: Path, name: str, **text: Any) -> Path:
    """As `write_checkpoint`, routed experts in NVFP4 without activation scales (W4A16), and the
    tables in bfloat16.

    Args:
        text: settings in place of the variant's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    config["text_config"] |= text
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["*linear_attn*", "*self_attn*", "*shared_expert*"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    geometry: Geometry = resolve(RECIPE.geometry)(config)
    tensors: dict[str, Tensor] = {}
    for spec in resolve(RECIPE.manifest)(geometry):
        if spec.integer or not spec.required:
            continue
        value = draw(spec, SEEDS[name])
        if ".experts." in spec.name:
            parts = quantise_nvfp4(value)
            tensors[spec.name] = parts.packed
            tensors[f"{spec.name}_scale"] = parts.block_scale
            tensors[f"{spec.name}_scale_2"] = parts.global_scale
        else:
            tensors[spec.name] = value.to(torch.bfloat16) if spec.table else value
    tensors.update(hash_constants(geometry))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def hash_constants(geometry: Geometry) -> dict[str, Tensor]:
    """The integer tensors of every layer that hashes."""
    result = {}
    for layer, constants in geometry.ngram.hashes.items():
        prefix = hash_prefix(geometry, layer)
        result[f"{prefix}layer_multipliers"] = torch.tensor(constants.multipliers)
        result[f"{prefix}ngram_heads_vocab_sizes"] = torch.tensor(constants.primes)
        result[f"{prefix}ngram_heads_offsets"] = torch.tensor(constants.offsets)
    return result


def draw(spec: TensorSpec, seed: int) -> Tensor:
    """The tensor of one name."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(spec.name.encode()))
    noise = torch.randn(spec.shape, generator=generator)
    name = spec.name.removesuffix(".weight")
    leaf = name.rpartition(".")[2]
    if name.endswith("linear_attn.norm"):
        return 1.0 + 0.15 * noise
    if "norm" in leaf:
        return 0.15 * noise
    if leaf in _SCALES:
        mean, scale = _SCALES[leaf]
        return mean + scale * noise
    if leaf.startswith("shard_"):
        return noise
    return noise / math.sqrt(spec.shape[-1])


_SCALES = {
    "A_log": (0.0, 0.7),
    "dt_bias": (-1.0, 0.7),
    "conv1d": (0.0, 0.4),
    "embed_tokens": (0.0, 1.0),
}

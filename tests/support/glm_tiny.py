"""Seeded random GLM checkpoints of a few hundred kilobytes, in published names and spellings.

Tensors are drawn by what their name says they are, each from its own stream, so that adding one
never changes another. Scales are chosen so that every block matters: gates away from 0 and 1,
decays from slow to fast, correction biases that change routing.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.glm5_next.recipe import RECIPE

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
    "projection_intermediate_size": 16,
    "model_type": "glm5_next_vision",
}

_COMMON: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "qk_rope_head_dim": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "hc_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
}


def _wide() -> dict[str, Any]:
    """Published spellings; few experts, unfolded attention maps, seven layers."""
    kinds = "KKKMKKM"
    return {
        **_COMMON,
        "vocab_size": 192,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 32,
        "index_kpool": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 4,
        "layer_types": [
            "deepseek_sparse_attention" if kind == "M" else "linear_attention" for kind in kinds
        ],
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, kind in enumerate(kinds) if kind == "K"],
            "full_attn_layers": [i for i, kind in enumerate(kinds) if kind == "M"],
        },
    }


def _flat() -> dict[str, Any]:
    """Flattened spellings; many experts and two shared ones, folded maps, two streams, an
    attention layer first, tight activation bounds."""
    kinds = "MKKM"
    return {
        **_COMMON,
        "vocab_size": 160,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "index_n_heads": 20,
        "index_head_dim": 24,
        "index_topk": 16,
        "index_kpool": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 0.7,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["full_attention" if kind == "M" else "linear_attention" for kind in kinds],
        "linear_num_heads": 8,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
    }


def _pooled() -> dict[str, Any]:
    """Pools of eight, a short convolution, three streams, a mild decay bound, experts in every
    layer."""
    kinds = "KMKMM"
    return {
        **_COMMON,
        "vocab_size": 128,
        "hidden_size": 40,
        "intermediate_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 48,
        "index_kpool": 8,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 12,
        "swiglu_limit": 10.0,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"] * 5,
        "layer_types": [
            "indexed_attention" if kind == "M" else "linear_attention" for kind in kinds
        ],
        "linear_num_heads": 4,
        "linear_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "linear_lower_bound": -2.0,
    }


def _long() -> dict[str, Any]:
    """As wide, but two pages of context are selected whole: dense attention first, then selection
    over pools that the dense passes wrote."""
    return {**_wide(), "index_topk": 128}


TEXTS = {"wide": _wide, "flat": _flat, "pooled": _pooled, "long": _long}
SEEDS = {"wide": 9, "flat": 11, "pooled": 6, "long": 9}
"""Chosen so that no row's last selected and first left-out pool come closer than float32 can tell
apart; the oracle asserts it."""


def config_of(name: str) -> dict[str, Any]:
    """config.json of a named variant."""
    text = TEXTS[name]()
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]},
        **{
            f"{kind}_token_id": text["vocab_size"] - 1 - i
            for i, kind in enumerate(
                ("image_start", "image_end", "video_start", "video_end", "image", "video")
            )
        },
    }


def write_checkpoint(folder: Path, name: str, *, extra: Mapping[str, Tensor] | None = None) -> Path:
    """Write a variant's config.json and model.safetensors; returns the folder.

    Args:
        extra: further tensors by published name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    geometry = resolve(RECIPE.geometry)(config)
    specs: list[TensorSpec] = resolve(RECIPE.manifest)(geometry)
    tensors = {spec.name: draw(spec, SEEDS[name]) for spec in specs if spec.required}
    tensors.update(extra or {})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw(spec: TensorSpec, seed: int) -> Tensor:
    """The tensor of one name."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(spec.name.encode()))
    noise = torch.randn(spec.shape, generator=generator)
    leaf = spec.name.removesuffix(".weight").rpartition(".")[2]
    if leaf.endswith("norm"):
        return 1.0 + 0.15 * noise
    if leaf in _SCALES:
        mean, scale = _SCALES[leaf]
        return mean + scale * noise
    if leaf.endswith("_conv1d"):
        return 0.4 * noise
    if leaf.endswith(("_base", "_ape")):
        return 0.4 * noise
    if leaf.endswith("_scale"):
        return 1.0 + 0.2 * noise
    return noise / math.sqrt(spec.shape[-1])


_SCALES = {
    "A_log": (0.0, 0.4),
    "dt_bias": (-1.0, 0.7),
    "e_score_correction_bias": (0.0, 0.08),
    "embed_tokens": (0.0, 1.0),
    "bias": (0.0, 0.05),
}

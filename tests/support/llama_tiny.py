"""Seeded random Llama checkpoints of a few hundred kilobytes, in published names and spellings."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.llama.recipe import RECIPE

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _odd() -> dict[str, Any]:
    """Three key heads, which two and four ranks pad; head and embedding are one; the drafter knows
    some tokens only."""
    return {
        **_COMMON,
        "vocab_size": 160,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "draft_vocab_size": 48,
    }


def _scaled() -> dict[str, Any]:
    """A head of its own, heads wider than their share of the stream, positions scaled."""
    return {
        **_COMMON,
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    }


TEXTS = {"llama-odd": _odd, "llama-scaled": _scaled}
UNDRAFTED = {"num_nextn_predict_layers": 0, "draft_vocab_size": 0}
"""Settings of a checkpoint without a drafter."""
SEED = 6


def write_checkpoint(folder: Path, name: str, **settings: Any) -> Path:
    """Write a variant's config.json and model.safetensors; returns the folder.

    Args:
        settings: in place of the variant's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = TEXTS[name]() | settings
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    specs: list[TensorSpec] = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(config))
    tensors = {spec.name: draw(spec) for spec in specs if spec.required}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw(spec: TensorSpec) -> Tensor:
    """A tensor from a stream of its own: norms about one, matrices that keep a row's size, and an
    embedding so small that as a head it gives logits which penalties can turn."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()) ^ SEED)
    if spec.integer:  # the drafter's tokens
        return torch.randperm(2 * spec.shape[0], generator=generator)[: spec.shape[0]].sort().values
    values = torch.randn(spec.shape, generator=generator)
    if len(spec.shape) == 1:
        return 1 + 0.2 * values
    return 0.3 * values if "embed_tokens" in spec.name else values / math.sqrt(spec.shape[1])

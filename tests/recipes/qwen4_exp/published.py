"""The published settings of Qwen3.8-Flash-Next's text model, as its config.json spells them.

Source: the public config of Qwen/Qwen3.8-Flash-Next; figures of the model's size follow from it.
"""

from __future__ import annotations

import copy
from typing import Any

LAYERS = 48
ATTENTION = [layer for layer in range(LAYERS) if layer % 4 == 3]

_TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "attention_bias": False,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "hc_count": 4,
    "hc_lowrank": 320,
    "head_dim": 256,
    "heads_per_ngram": 8,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 128,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "layer_types": [
        "full_attention" if layer in ATTENTION else "linear_attention" for layer in range(LAYERS)
    ],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "make_ngram_vocab_size_divisible_by": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 640,
    "mtp": {
        "hybrid": True,
        "layer_types": ["full_attention"],
        "num_hidden_layers": 1,
        "rope_theta": 10000000,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "ngram_size": 3,
    "ngram_vocab_size_base": 20000000,
    "norm_topk_prob": True,
    "num_attention_heads": 24,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 2560,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "seed": 1234,
    "shared_expert_intermediate_size": 640,
    "split_ngram_parts": 128,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}


def published_config() -> dict[str, Any]:
    """A fresh copy to change at will."""
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": copy.deepcopy(_TEXT),
    }

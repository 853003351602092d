"""The published settings of GLM-5.3-Flash's text model, as its config.json spells them.

Source: the public config of zai-org/GLM-5.3-Flash; figures of the model's size follow from it.
"""

from __future__ import annotations

import copy
from typing import Any

LAYERS = 45
ATTENTION = [layer for layer in range(LAYERS) if layer % 4 == 3]
RECURRENT = [layer for layer in range(LAYERS) if layer % 4 != 3]

_TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "indexer_types": ["full"] * LAYERS,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "layer_types": [
        "deepseek_sparse_attention" if layer in ATTENTION else "linear_attention"
        for layer in range(LAYERS)
    ],
    "linear_attn_config": {
        "num_heads": 64,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": RECURRENT,
        "full_attn_layers": ATTENTION,
    },
    "max_position_embeddings": 1048576,
    "mhc": True,
    "mla_use_nope": True,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
    "moe_intermediate_size": 2048,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 288,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "q_lora_rank": 1536,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "swiglu_limit": 10.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def published_config() -> dict[str, Any]:
    """A fresh copy to change at will."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": copy.deepcopy(_TEXT),
    }

"""The published settings of DeepSeek-V4.1-Flash's text model, as its config.json spells them.

Source: the public config of deepseek-ai/DeepSeek-V4.1-Flash; the figures of the model's size follow
from it.
"""

from __future__ import annotations

import copy
from typing import Any

LAYERS = 40
STAGES = 3

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "attention_bias": False,
    "candidate_block_size": 8,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_noise_token_id": 128799,
    "dspark_num_experts_per_tok": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "engram_compressed_vocab_size": 99092,
    "engram_head_dim": 256,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_pad_token_id": 2,
    "engram_vocab_size": 16000000,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_topk": 512,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": STAGES,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1280,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-20,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def published_config() -> dict[str, Any]:
    """A fresh copy to change at will."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": copy.deepcopy(_TEXT),
    }

"""GLM-5.3-Flash's released sizes, with fewer layers."""

from __future__ import annotations

from typing import Any

from flare_ray.recipes.glm5_next.geometry import Geometry, read_geometry


def config(layers: int) -> dict[str, Any]:
    """config.json of the first `layers` layers and the drafter's one."""
    kinds = [
        "deepseek_sparse_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)
    ]
    return {
        "model_type": "glm5_next_text",
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "eos_token_id": [154820, 154827, 154829],
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "layer_types": kinds,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
    }


def geometry(layers: int) -> Geometry:
    """Sizes of `config`."""
    return read_geometry(config(layers))


_SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "eos_token_id": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "n_routed_experts": 24,
    "num_experts_per_tok": 2,
}


def small_geometry(*, top_k: int) -> Geometry:
    """Five layers of every kind in sizes for tests; `top_k` tokens are selected."""
    values = config(5) | _SMALL | {"index_topk": top_k}
    values["linear_attn_config"] |= {"num_heads": 2, "head_dim": 16}
    return read_geometry(values)

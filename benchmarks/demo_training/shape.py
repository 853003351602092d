"""Shape of the demo checkpoint in published spellings, and the ids of its added tokens."""

from __future__ import annotations

from typing import Any

MARKERS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
"""Special tokens, ids 0 to 15 in this order; a decoder that skips special tokens drops them."""

TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Added but not special, ids 16 to 25: parsers need them in the decoded text."""

NUM_ADDED = 48
"""Ids 0 to 47 are added tokens; the ones without a name above are ``<|reserved_N|>``."""

VOCAB_SIZE = 8192
ASSISTANT_ID = MARKERS.index("<|assistant|>")
STOP_IDS = tuple(MARKERS.index(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>"))
SHORT_ROW = 1024
LONG_ROW = 4096
MTP_DEPTH = 7
TEMPERATURE, TOP_P = 0.6, 0.95
"""Default sampling, as small models are published with it. At temperature one a model of this size
often leaves a text that it copies; the card has the figures of both."""


def added_tokens() -> list[str]:
    """Names of ids 0 to ``NUM_ADDED - 1``."""
    names = [*MARKERS, *TAGS]
    return names + [f"<|reserved_{i}|>" for i in range(NUM_ADDED - len(names))]


def text_config() -> dict[str, Any]:
    """The published ``text_config`` of the demo: six layers K K K M K M, 16.16 M parameters with
    the MTP layer.

    The head geometry is the production one (KDA 128, MLA latent 512, qk and v 256, index 128), so
    that the same checkpoint exercises the same kernels; width, depth, heads and experts are small.
    """
    kinds, num_dense = "KKKMKM", 4
    layers = len(kinds)
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": LONG_ROW,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": list(STOP_IDS),
        "pad_token_id": 0,
        "bos_token_id": None,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "layer_types": [
            "deepseek_sparse_attention" if k == "M" else "linear_attention" for k in kinds
        ],
        **_attention(kinds),
        **_feed_forward(layers, num_dense),
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
    }


def _feed_forward(layers: int, num_dense: int) -> dict[str, Any]:
    """Dense layers first, then mixtures of experts."""
    return {
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (layers - num_dense),
        "first_k_dense_replace": num_dense,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
    }


def _attention(kinds: str) -> dict[str, Any]:
    """KDA, latent attention and indexer; ``kinds`` has a K or an M per layer."""
    return {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, k in enumerate(kinds) if k == "K"],
            "full_attn_layers": [i for i, k in enumerate(kinds) if k == "M"],
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "mla_use_nope": True,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * len(kinds),
    }


def checkpoint_config() -> dict[str, Any]:
    """The whole ``config.json``; the vision part is the smallest that transformers accepts and has
    no weights.
    """
    text = text_config()
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": text["hidden_size"],
        "image_size": 28,
        "patch_size": 14,
        "projection_intermediate_size": 32,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "image_start_token_id": MARKERS.index("<|begin_of_image|>"),
        "image_end_token_id": MARKERS.index("<|end_of_image|>"),
        "video_start_token_id": MARKERS.index("<|begin_of_video|>"),
        "video_end_token_id": MARKERS.index("<|end_of_video|>"),
        "image_token_id": MARKERS.index("<|image|>"),
        "video_token_id": MARKERS.index("<|video|>"),
        "transformers_version": "5.24.0",
    }


def generation_config() -> dict[str, Any]:
    """Default sampling, and this tokenizer's stop ids."""
    return {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "eos_token_id": list(STOP_IDS),
        "pad_token_id": 0,
        "transformers_version": "5.24.0",
    }

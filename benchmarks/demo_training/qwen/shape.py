"""Shape of the Qwen3.8-Flash demo in published spellings, and the ids of its added tokens."""

from __future__ import annotations

from typing import Any

from ..shape import LONG_ROW, TEMPERATURE, TOP_P, VOCAB_SIZE

MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens, ids 0 to 7 in this order; a decoder that skips special tokens drops them."""

TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Added but not special, ids 8 to 13: parsers need them in the decoded text."""

NUM_ADDED = 32
END_OF_TEXT, TURN, END_OF_TURN = 0, 1, 2
STOP_IDS = (END_OF_TURN, END_OF_TEXT)
"""The hash of n-grams starts anew after the end of a text alone."""


def added_tokens() -> list[str]:
    """Names of ids 0 to ``NUM_ADDED - 1``."""
    names = [*MARKERS, *TAGS]
    return names + [f"<|reserved_{i}|>" for i in range(NUM_ADDED - len(names))]


def text_config() -> dict[str, Any]:
    """The published ``text_config`` of the demo: six layers, two recurrent to one of attention.

    Ratios are the released model's (value heads to key heads, gated queries, a quarter of a head
    rotated, groups of four); widths, heads and experts are small enough for 20 MiB. Every size
    divides by four ranks.
    """
    kinds = ("linear_attention", "linear_attention", "full_attention") * 2
    return {
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": LONG_ROW,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": END_OF_TEXT,
        "bos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "num_hidden_layers": len(kinds),
        "layer_types": list(kinds),
        **_blocks(),
        **_streams(),
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }


def _blocks() -> dict[str, Any]:
    """Recurrent layers, attention with its indexer, experts."""
    return {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "output_gate_type": "sigmoid",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
    }


def _streams() -> dict[str, Any]:
    """Residual streams and the embedding of n-grams."""
    return {
        "hc_count": 4,
        "hc_lowrank": 24,
        "ple_layer_ids": [2],
        "ple_embed_dim": 256,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 3000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 4,
        "seed": 1234,
    }


def checkpoint_config() -> dict[str, Any]:
    """The whole ``config.json``; the vision part is a small one without weights."""
    text = text_config()
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": MARKERS.index("<|image_pad|>"),
        "video_token_id": MARKERS.index("<|video_pad|>"),
        "vision_start_token_id": MARKERS.index("<|vision_start|>"),
        "vision_end_token_id": MARKERS.index("<|vision_end|>"),
        "transformers_version": "5.24.0",
    }


def generation_config() -> dict[str, Any]:
    """Default sampling, and this tokenizer's stop ids."""
    return {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "eos_token_id": list(STOP_IDS),
        "pad_token_id": END_OF_TEXT,
        "bos_token_id": END_OF_TEXT,
        "transformers_version": "5.24.0",
    }

"""Seeded random DeepSeek-V4.1 checkpoints of some hundred kilobytes, in published names and
spellings, with a tokeniser of one word per token.

Tensors are drawn by what their name says they are, each from its own stream, so that adding one
never changes another. Scales are chosen so that every mechanism shows in the logits.
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

from flare_ray.device.ops.engram.buckets import bucket_layout
from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.deepseek_v41.recipe import RECIPE

_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "attention_bias": False,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "engram_pad_token_id": 2,
    "dspark_block_size": 5,
    "kv_fake_quantisation": False,
}


def _sparse() -> dict[str, Any]:
    """All four modes, candidates, ratios 2 and 1, two Engram layers, three stages; everything
    divides by four."""
    return {
        **_COMMON,
        "vocab_size": 192,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 3,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 4,
        "o_lora_rank": 12,
        "sliding_window": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "engram_layer_ids": [1, 3],
        "engram_vocab_size": 97,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "dspark_noise_token_id": 191,
        "dspark_markov_rank": 16,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }


def _pooled() -> dict[str, Any]:
    """A source of ratio 4 in the first layer, no candidates, two streams, one table, two stages,
    tight activation bounds, many experts."""
    return {
        **_sparse(),
        "vocab_size": 160,
        "hidden_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 2,
        "compress_ratios": [4, 4, 0, 1, 1, 0, 0],
        "kv_source_layer_ids": [0, 3],
        "index_source_layer_ids": [0, 1, 3],
        "candidate_source_layer_id": -1,
        "index_topk": 5,
        "index_n_heads": 20,
        "sliding_window": 24,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.7,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        "engram_layer_ids": [2],
        "engram_max_ngram_size": 3,
        "dspark_noise_token_id": 159,
        "dspark_target_layer_ids": [1, 4],
        "dspark_n_routed_experts": 8,
    }


def _rounded() -> dict[str, Any]:
    """As sparse, with keys and index vectors rounded as the published model has them."""
    return {**_sparse(), "kv_fake_quantisation": True}


def _packed() -> dict[str, Any]:
    """As sparse, with widths that quantised products take: whole groups of 32 inputs on two
    ranks."""
    return {**_sparse(), "q_lora_rank": 32, "o_lora_rank": 16, "moe_intermediate_size": 64}


TEXTS = {"sparse": _sparse, "pooled": _pooled, "rounded": _rounded, "packed": _packed}
SEEDS = {"sparse": 5, "pooled": 7, "rounded": 7, "packed": 5}
"""Chosen so that no row's last selected and first left-out entry come closer than float32 can tell
apart (the oracle asserts it), and that no rounded value lies so near a half-way point."""


def words(vocab_size: int) -> list[str]:
    """Token texts; some differ in case, accent or white space only and so share an id."""
    texts: list[str] = []
    for token in range(vocab_size):
        earlier = f"w{token - token % 5}"
        texts.append(
            {
                1: earlier.upper(),
                3: f" {earlier}\n" if token % 2 else f"\u0175{earlier[1:]}",
            }.get(token % 5, f"w{token}")
        )
    return texts


def compressed(vocab_size: int) -> list[int]:
    """Compressed id of every token, by the rule above and not by a normaliser."""
    numbers: dict[str, int] = {}
    plain = [f"w{t - t % 5}" if t % 5 in (1, 3) else f"w{t}" for t in range(vocab_size)]
    return [numbers.setdefault(text, len(numbers)) for text in plain]


def set_compressed_ids(text: dict[str, Any], count: int) -> None:
    """Write a number of compressed ids and the table rows that follow from it."""
    tables = bucket_layout(
        text["engram_layer_ids"],
        base=text["engram_vocab_size"],
        max_ngram=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        compressed_ids=count,
    )
    text["engram_compressed_vocab_size"] = count
    text["engram_num_embeddings"] = [table.rows for table in tables]


def config_of(name: str) -> dict[str, Any]:
    """config.json of a named variant."""
    text = TEXTS[name]()
    set_compressed_ids(text, max(compressed(text["vocab_size"])) + 1)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32",
        "eos_token_id": 1,
        "text_config": text,
    }


def write_checkpoint(folder: Path, name: str) -> Path:
    """Write a variant's config.json, tokenizer.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["text_config"]["vocab_size"])
    save_file(tensors_of(config, SEEDS[name]), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json of one word per token."""
    vocabulary = {text: token for token, text in enumerate(words(vocab_size))}
    assert len(vocabulary) == vocab_size
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))


def tensors_of(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of the manifest."""
    specs: list[TensorSpec] = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(config))
    return {spec.name: draw(spec, seed) for spec in specs}


def draw(spec: TensorSpec, seed: int) -> Tensor:
    """The tensor of one name."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(spec.name.encode()))
    noise = torch.randn(spec.shape, generator=generator)
    leaf = spec.name.removesuffix(".weight").rpartition(".")[2]
    if leaf.endswith("norm") or leaf in ("q_weight", "k_weight"):
        return 1.0 + 0.15 * noise
    if leaf in ("bias", "bias_vl"):
        return 0.1 * noise
    if leaf.endswith("_base"):
        return 0.4 * noise
    if leaf.endswith("_scale"):
        return 1.0 + 0.2 * noise
    if leaf in ("attn_sink", "embed"):
        return noise
    return _GAINS.get(leaf, 1.0) * noise / math.sqrt(spec.shape[-1])


_GAINS = {"head": 3.0, "wq_b": 2.0, "wgate": 2.0}


def quantised_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of the manifest as the release stores it: FP8 with exponents per 32 x 32 block,
    per 32 channels of a row in tables, FP4 with exponents per 32 inputs in routed experts."""
    from flare_ray.device.ops.key_rounding.api import power_of_two_above
    from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4

    specs: list[TensorSpec] = resolve(RECIPE.manifest)(resolve(RECIPE.geometry)(config))
    result: dict[str, Tensor] = {}
    for spec in specs:
        value, scale_name = draw(spec, seed), spec.name.removesuffix("weight") + "scale"
        if not spec.quantisable:
            result[spec.name] = value
        elif ".experts." in spec.name:
            parts = quantise_mxfp4(value)
            result[spec.name] = parts.packed.view(torch.int8)
            result[scale_name] = parts.scale.to(torch.float8_e8m0fnu)
        else:
            high = 1 if "engram.embed" in spec.name else 32
            rows, columns = (
                -(-size // edge) for size, edge in zip(spec.shape, (high, 32), strict=True)
            )
            padded = torch.zeros(rows * high, columns * 32)
            padded[: spec.shape[0], : spec.shape[1]] = value
            blocks = padded.view(rows, high, columns, 32)
            scale = power_of_two_above(blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448)
            packed = (blocks / scale[:, None, :, None]).view_as(padded).to(torch.float8_e4m3fn)
            result[spec.name] = packed[: spec.shape[0], : spec.shape[1]].contiguous()
            result[scale_name] = scale.to(torch.float8_e8m0fnu)
    return result


def write_quantised(folder: Path, name: str, **text: Any) -> Path:
    """As `write_checkpoint`, in the release's formats and with its declaration.

    Args:
        text: settings in place of the variant's.
    """
    write_checkpoint(folder, name)
    config = config_of(name)
    config["text_config"] |= text
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = quantised_tensors(config, SEEDS[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_served(folder: Path) -> Path:
    """A checkpoint that a whole server can take: the sparse variant over a byte-level tokeniser."""
    from flare_ray.recipes.deepseek_v41.engram import token_map
    from tests.support.chat_checkpoint import write_chat_checkpoint

    write_chat_checkpoint(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = config_of("sparse")
    text = config["text_config"]
    text |= {"vocab_size": SERVED_VOCABULARY, "dspark_noise_token_id": SERVED_VOCABULARY - 1}
    set_compressed_ids(text, token_map(folder, SERVED_VOCABULARY)[1])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors_of(config, 5), folder / "model.safetensors", {"format": "pt"})
    return folder


SERVED_VOCABULARY = 272

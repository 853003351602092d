"""A Llama model in a GGUF file, as a checkpoint folder in published names.

Quantised blocks become BF16. GGUF keeps the rows of queries and keys in pairs of channels that
turn together; published checkpoints keep the two halves of a head apart, which is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from flare_ray.errors import CheckpointError, ConfigError

CONTROL_TOKEN = 3
"""Type of tokens that no text contains."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
TOKENIZER_MODEL, TOKENIZER_SPLIT = "gpt2", "smollm"

Advance = Callable[[int, int], None]
"""Called with the tensors done and those there are."""


def convert(source: Path, folder: Path, advance: Advance) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Args:
        source: the GGUF file.
        folder: exists.
    Raises:
        ConfigError: the package that reads GGUF is not installed.
        CheckpointError: another architecture or tokenizer, or tensors of other names.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "reading GGUF needs the package gguf: pip install 'flare-ray[packaged]'"
        ) from error
    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("general.architecture") != "llama":
        raise CheckpointError(
            f"{source.name} holds the architecture {values.get('general.architecture')!r}, "
            "expected 'llama'"
        )
    tensors: dict[str, Tensor] = {}
    for done, (name, array) in enumerate(_arrays(reader, values), start=1):
        tensors[name] = torch.from_numpy(array).to(torch.bfloat16)
        advance(done, len(reader.tensors))
    config = _config(values, tied="lm_head.weight" not in tensors)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer(folder, values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads d, N] with channels 2 i, 2 i + 1 of a head moved to i and i + d / 2."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _arrays(reader: Any, values: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Published name and float32 values of every tensor."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        block, _, part = tensor.name.rpartition(".")
        layer, _, kind = block.rpartition(".")
        number = layer.removeprefix("blk.")
        if part != "weight" or kind not in NAMES or (layer and not number.isdigit()):
            raise CheckpointError(f"the GGUF file holds {tensor.name}, which no Llama model has")
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind in PAIRED:
            array = unpaired(array, values[f"llama.{PAIRED[kind]}"])
        prefix = f"model.layers.{number}." if layer else ""
        yield f"{prefix}{NAMES[kind]}.weight", np.array(array, order="C")


def _config(values: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def of(name: str) -> Any:
        return values[f"llama.{name}"]

    heads, hidden = of("attention.head_count"), of("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": of("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(of("rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def _write_tokenizer(folder: Path, values: dict[str, Any]) -> None:
    """Byte-level BPE that splits digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def of(name: str) -> Any:
        return values[f"tokenizer.ggml.{name}"]

    if (of("model"), of("pre")) != (TOKENIZER_MODEL, TOKENIZER_SPLIT):
        raise CheckpointError(
            f"the GGUF file's tokenizer is {of('model')!r} with the split {of('pre')!r}, expected "
            f"{TOKENIZER_MODEL!r} with {TOKENIZER_SPLIT!r}"
        )
    tokens = of("tokens")
    merges = [tuple(merge.split(" ")) for merge in of("merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, of("token_type"), strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        f"{role}_token": tokens[of(f"{key}_token_id")]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": values["tokenizer.chat_template"],
            **names,
        },
    )


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")

"""A small GLM checkpoint with a tokeniser, for whole servers: its text is letters, and its drafter
is right about half the time.

Tensors are those of `glm_tiny`, but for three: the vocabulary head is zero for everything but
letters, so that greedy text is readable and never ends by itself; it also leans towards one letter
after another, and the drafter's projection passes the embedding through, so that both know the same
habit. Everything else stays random and large enough to break the habit: a wrong state shows in the
text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from flare_ray.recipes.declaration import TensorSpec, resolve
from flare_ray.recipes.glm5_next.recipe import RECIPE
from tests.support.chat_checkpoint import write_chat_checkpoint
from tests.support.fake_engine_client import byte_tokens
from tests.support.glm_tiny import config_of, draw

VOCAB_SIZE = 272
LETTERS = ascii_letters + digits + " ."
SAMPLED_LETTERS = "abcdefghijkl"
MODEL = "glm-micro"
SEED = 5
LAYERS = "KKM"
"""Two recurrent layers, the first with a dense feed-forward, then indexed attention."""
HIDDEN_SHARE, PROJECTION = 0.3, 4.0
"""Drafter: weight of the hidden state beside the embedding, and of both beside the layer's own
output. Chosen so that about half of the drafts are accepted."""


def micro_config(vocab_size: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """config.json: the `wide` variant with fewer layers and another vocabulary."""
    config = config_of("wide")
    text = config["text_config"]
    kda = [i for i, kind in enumerate(LAYERS) if kind == "K"]
    mla = [i for i, kind in enumerate(LAYERS) if kind == "M"]
    text |= {
        "vocab_size": vocab_size,
        "num_hidden_layers": len(LAYERS),
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(LAYERS) - 1),
        "layer_types": [
            "deepseek_sparse_attention" if kind == "M" else "linear_attention" for kind in LAYERS
        ],
        "eos_token_id": list(eos_ids),
    }
    text["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": mla}
    images = ("image_start", "image_end", "video_start", "video_end", "image", "video")
    return {**config, **{f"{k}_token_id": vocab_size - 1 - i for i, k in enumerate(images)}}


def micro_tensors(config: dict[str, Any], letters: Sequence[int]) -> dict[str, Tensor]:
    """Tensors by published name; `letters` are the token ids that the model prefers to say."""
    geometry = resolve(RECIPE.geometry)(config)
    specs: list[TensorSpec] = resolve(RECIPE.manifest)(geometry)
    tensors = {spec.name: draw(spec, SEED) for spec in specs if spec.required}
    embedding = tensors["model.language_model.embed_tokens.weight"]
    order = torch.tensor(letters)
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(SEED))]
    head = torch.zeros_like(tensors["lm_head.weight"])
    habit = embedding[order.roll(1)] / math.sqrt(geometry.hidden)
    head[order] = tensors["lm_head.weight"][order] + habit
    tensors["lm_head.weight"] = head
    [joint] = [name for name in tensors if name.endswith("eh_proj.weight")]
    hidden = HIDDEN_SHARE * tensors[joint][:, geometry.hidden :]
    tensors[joint] = PROJECTION * torch.cat((torch.eye(geometry.hidden), hidden), dim=1)
    return tensors


def served_glm(folder: Path) -> Path:
    """Write config, weights, byte tokeniser and chat template; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    [end] = [256]  # <|end|>, the first control token behind the bytes
    config = micro_config(VOCAB_SIZE, [end])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = micro_tensors(config, byte_tokens(LETTERS))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return write_chat_checkpoint(folder)


def engine_settings(checkpoint: Path, **fields: object) -> dict[str, Any]:
    """The `engine` section for a micro checkpoint, on the CPU."""
    return {
        "checkpoint": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "concurrency": 4,
        "context_tokens": 512,
        "prefill_tokens": 64,
        **fields,
    }


def deployment_args(
    checkpoint: Path, *, engines: int = 1, ingresses: int = 1, **engine: object
) -> dict[str, Any]:
    """Arguments of the application, small enough for two logical CPUs."""
    return {
        "model_name": MODEL,
        "engine": engine_settings(checkpoint, **engine),
        "engine_deployment": {
            "replicas": engines,
            "cpus_per_rank": 0.25,
            "graceful_shutdown_s": 30.0,
        },
        "ingress": {"min_replicas": ingresses, "max_replicas": ingresses, "cpus": 0.1},
    }


def sampled_glm(folder: Path) -> Path:
    """A checkpoint of the letters alone that `SAMPLED_LETTERS` lists: few enough to compute every
    continuation."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = range(len(SAMPLED_LETTERS))
    config = micro_config(len(ids), [len(ids) - 1])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(micro_tensors(config, ids), folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {letter: i for i, letter in enumerate(SAMPLED_LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

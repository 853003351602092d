"""Sizes and constants of a checkpoint, read from its config.json and checked one by one.

A setting that asks for arithmetic this recipe does not have (biases, rotary positions scaled
otherwise than by Llama 3's rule) is refused by name.

Sources: README.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flare_ray.recipes.fields import Fields


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies for contexts longer than those trained on first.

    Attributes:
        factor: what slow frequencies are divided by.
        low, high: turns within `context` below which a frequency is slow, above which it stays.
        context: tokens of the first training.
    """

    factor: float
    low: float
    high: float
    context: int

    def scaled(self, frequency: float) -> float:
        """A frequency in radians a token; between the two bounds the change is gradual."""
        turns = self.context * frequency / (2 * math.pi)
        if turns < self.low:
            return frequency / self.factor
        if turns > self.high:
            return frequency
        share = (turns - self.low) / (self.high - self.low)
        return (1 - share) * frequency / self.factor + share * frequency


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Query heads that share key heads in equal groups of neighbours; whole heads are rotated."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    scaling: Llama3Scaling | None

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads

    def frequencies(self) -> list[float]:
        """Radians a token of every pair of channels, fastest first."""
        plain = [self.theta ** -(i / self.head_dim) for i in range(0, self.head_dim, 2)]
        return plain if self.scaling is None else [self.scaling.scaled(f) for f in plain]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything the builders need to know about a checkpoint.

    Attributes:
        num_drafter_layers: MTP layers, numbered after the target's.
        draft_vocab_size: tokens that the drafter may propose, 0 = all.
        eos_ids: terminal token ids of config.json.
        tied: the vocabulary head is the embedding.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    num_drafter_layers: int
    draft_vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    norm_eps: float
    attention: AttentionShape
    width: int
    tied: bool

    def layer_prefix(self, layer: int) -> str:
        """Beginning of a layer's tensor names."""
        return f"model.layers.{layer}."


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a checkpoint.

    Args:
        config: parsed config.json.
    Raises:
        CheckpointError: names each key that is missing, mistyped, out of range, or asks for
            something this recipe does not compute.
    """
    text = Fields(config)
    geometry = Geometry(
        vocab_size=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_drafter_layers=text.integer("num_nextn_predict_layers", default=0, least=0),
        draft_vocab_size=text.integer("draft_vocab_size", default=0, least=0),
        max_context_tokens=text.integer("max_position_embeddings"),
        eos_ids=text.token_ids("eos_token_id", fallback=None),
        norm_eps=text.real("rms_norm_eps"),
        attention=_attention(text),
        width=text.integer("intermediate_size"),
        tied=text.switch("tie_word_embeddings", default=False),
    )
    for key, value in {
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
    }.items():
        text.fixed(key, value)
    _check_relations(text, geometry)
    text.raise_problems()
    return geometry


def _attention(text: Fields) -> AttentionShape:
    heads, hidden = text.integer("num_attention_heads"), text.integer("hidden_size")
    rope = text.nested("rope_parameters")
    theta = text.either("rope_theta", rope, "rope_theta", kind=float)
    text.require(theta > 0, "rope_theta", "above 0")
    old = text.nested("rope_scaling")
    scaling = _scaling(old) or _scaling(rope)
    for fields in (rope, old):
        fields.hand_problems_to(text)
    return AttentionShape(
        heads=heads,
        kv_heads=text.integer("num_key_value_heads", default=heads),
        head_dim=text.integer("head_dim", default=max(1, hidden // heads)),
        theta=theta,
        scaling=scaling,
    )


def _scaling(rope: Fields) -> Llama3Scaling | None:
    """Of `rope_parameters`, or of `rope_scaling` in older files; None = positions as they are."""
    kind = "rope_type" if rope.has("rope_type") else "type"
    if not rope.has(kind) or rope.equals(kind, "default"):
        return None
    if not rope.equals(kind, "llama3"):
        rope.require(False, kind, "default or llama3")
        return None
    scaling = Llama3Scaling(
        factor=rope.real("factor"),
        low=rope.real("low_freq_factor"),
        high=rope.real("high_freq_factor"),
        context=rope.integer("original_max_position_embeddings"),
    )
    rope.require(scaling.low < scaling.high, "low_freq_factor", "below high_freq_factor")
    return scaling


def _check_relations(text: Fields, geometry: Geometry) -> None:
    attention = geometry.attention
    text.require(
        attention.heads % attention.kv_heads == 0,
        "num_attention_heads",
        f"a multiple of num_key_value_heads {attention.kv_heads}",
    )
    text.require(attention.head_dim % 2 == 0, "head_dim", "an even number of channels")
    text.require(
        geometry.num_drafter_layers in (0, 1), "num_nextn_predict_layers", "0 or 1 drafter layer"
    )
    most = geometry.vocab_size if geometry.num_drafter_layers else 0
    text.require(
        geometry.draft_vocab_size <= most, "draft_vocab_size", f"at most {most} tokens of a drafter"
    )
    text.require(
        bool(geometry.eos_ids) and max(geometry.eos_ids) < geometry.vocab_size,
        "eos_token_id",
        f"ids below vocab_size {geometry.vocab_size}",
    )

"""Sizes and constants of a checkpoint, read from its config.json and checked one by one.

A setting that asks for arithmetic this recipe does not have (scaled rotary positions, several index
key heads, a drafter with embeddings of its own) is refused by name.

Sources: README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.recipes.fields import Fields
from flare_ray.recipes.qwen4_exp.ngram import HashConstants, HashSettings, hash_constants

PREFIX = "model.language_model."
"""Beginning of every target tensor's name but the vocabulary head's."""


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Recurrent layers: gated delta rule, several value heads to a key head.

    gate: activation of the output gate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate: Literal["sigmoid", "silu"]

    @property
    def keep(self) -> int:
        """History rows of the short convolution."""
        return self.conv_kernel - 1

    @property
    def key_width(self) -> int:
        """Channels of q and of k."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of v and of the output gate."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention layers; the first `rotary` channels of a head are rotated."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    theta: float


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Selection of attended tokens: `budget` tokens in groups of `group`, plus the open group."""

    heads: int
    head_dim: int
    budget: int
    group: int


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed experts of `width`, and one gated shared expert of `shared_width`."""

    experts: int
    top_k: int
    width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class NgramShape:
    """Per-layer embedding of hashed n-grams.

    Attributes:
        hashes: constants by target layer, counted from 0.
        embed: channels of all heads together.
        size: longest n-gram, also the dilation of the convolution.
        heads: heads per n-gram order.
        conv_kernel: taps of the convolution.
        padded_rows: rows of a table as stored, by layer.
        shards: tensors that a table is stored in.
        reset_id: token that starts hashing anew.
    """

    hashes: Mapping[int, HashConstants]
    embed: int
    size: int
    heads: int
    conv_kernel: int
    padded_rows: Mapping[int, int]
    shards: int
    reset_id: int

    @property
    def all_heads(self) -> int:
        """Heads of every order."""
        return (self.size - 1) * self.heads

    @property
    def keep(self) -> int:
        """History rows of the dilated convolution."""
        return (self.conv_kernel - 1) * self.size


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything the builders need to know about a checkpoint.

    Attributes:
        recurrent: per target layer, True = gated delta rule, False = sparse attention.
        num_drafter_layers: MTP layers.
        eos_ids: terminal token ids of config.json.
        streams / mixer_rank: residual streams, and the rank of the maps that mix them.
        recurrence: how a round's states are kept: their records, or one saved state a row, which
            records are compared with. Not a setting of the checkpoint.
    """

    vocab_size: int
    hidden: int
    recurrent: tuple[bool, ...]
    num_drafter_layers: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    norm_eps: float
    streams: int
    mixer_rank: int
    gdn: GdnShape
    attention: AttentionShape
    index: IndexShape
    moe: MoeShape
    ngram: NgramShape
    recurrence: Literal["records", "columns"] = "records"

    @property
    def num_layers(self) -> int:
        """Target layers; the drafter's layer is numbered after them."""
        return len(self.recurrent)

    @property
    def flat(self) -> int:
        """Width of all streams side by side."""
        return self.streams * self.hidden

    def layer_prefix(self, layer: int) -> str:
        """Beginning of a target layer's tensor names."""
        return f"{PREFIX}layers.{layer}."


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a checkpoint.

    Args:
        config: parsed config.json; the text settings are its `text_config` or itself.
    Raises:
        CheckpointError: names each key that is missing, mistyped, out of range, or asks for
            something this recipe does not compute.
    """
    nested = config.get("text_config")
    text = Fields(nested if isinstance(nested, Mapping) else config)
    layers = text.integer("num_hidden_layers")
    eos_ids = text.token_ids("eos_token_id", fallback=config.get("eos_token_id"))
    geometry = Geometry(
        vocab_size=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        recurrent=_recurrent_layers(text, layers),
        num_drafter_layers=text.integer("mtp_num_hidden_layers", default=0, least=0),
        max_context_tokens=text.integer("max_position_embeddings"),
        eos_ids=eos_ids,
        norm_eps=text.real("rms_norm_eps"),
        streams=text.integer("hc_count", least=2),
        mixer_rank=text.integer("hc_lowrank"),
        gdn=GdnShape(
            key_heads=text.integer("linear_num_key_heads"),
            value_heads=text.integer("linear_num_value_heads"),
            key_dim=text.integer("linear_key_head_dim"),
            value_dim=text.integer("linear_value_head_dim"),
            conv_kernel=text.integer("linear_conv_kernel_dim", least=2),
            gate=_output_gate(text),
        ),
        attention=_attention(text),
        index=IndexShape(
            heads=text.integer("indexer_n_heads"),
            head_dim=text.integer("indexer_head_dim"),
            budget=text.integer("indexer_budget"),
            group=text.integer("indexer_compress_ratio", least=2),
        ),
        moe=MoeShape(
            experts=text.integer("num_experts"),
            top_k=text.integer("num_experts_per_tok"),
            width=text.integer("moe_intermediate_size"),
            shared_width=text.integer("shared_expert_intermediate_size"),
        ),
        ngram=_ngram(text, layers, eos_ids),
    )
    _check_fixed_settings(text)
    _check_relations(text, geometry)
    text.raise_problems()
    return geometry


def _recurrent_layers(text: Fields, layers: int) -> tuple[bool, ...]:
    kinds = {"linear_attention": True, "full_attention": False, "indexed_attention": False}
    listed = text.layer_kinds("layer_types", layers, kinds)
    if listed is None:
        text.missing("layer_types", "one attention kind per layer")
    return listed or (True,) * layers


def _output_gate(text: Fields) -> Literal["sigmoid", "silu"]:
    for gate in ("sigmoid", "silu"):
        if text.equals("output_gate_type", gate):
            return gate
    # An absent one means the activation of the model, of which one is served.
    text.require(not text.has("output_gate_type"), "output_gate_type", "sigmoid or silu")
    return "silu"


def _attention(text: Fields) -> AttentionShape:
    rope = text.nested("rope_parameters")
    if not rope.has("rope_theta"):
        rope.missing("rope_theta", "the base of the rotary positions")
    head_dim = text.integer("head_dim")
    factor = rope.real("partial_rotary_factor") if rope.has("partial_rotary_factor") else 1.0
    theta = rope.real("rope_theta") if rope.has("rope_theta") else 1.0
    rope.fixed("rope_type", "default")
    mtp = text.nested("mtp")
    if mtp.has("rope_theta"):
        mtp.require(mtp.real("rope_theta") == theta, "rope_theta", f"{theta}, as the target's")
    mtp.fixed("layer_types", ["full_attention"])
    rotary = int(head_dim * factor)
    rope.require(
        rotary % 2 == 0 and 0 < rotary <= head_dim,
        "partial_rotary_factor",
        f"an even number of up to head_dim = {head_dim} channels",
    )
    rope.hand_problems_to(text)
    mtp.hand_problems_to(text)
    return AttentionShape(
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary=rotary,
        theta=theta,
    )


def _ngram(text: Fields, layers: int, eos_ids: tuple[int, ...]) -> NgramShape:
    numbers = text.layer_list("ple_layer_ids", first=1, last=layers)
    settings = HashSettings(
        vocab_size=text.integer("vocab_size"),
        size=text.integer("ngram_size", default=3, least=2),
        heads=text.integer("heads_per_ngram", default=8),
        base=text.integer("ngram_vocab_size_base", default=20_000_000),
        seed=text.integer("seed", default=1234, least=0),
    )
    divisor = text.integer("make_ngram_vocab_size_divisible_by", default=128)
    hashes = {number - 1: hash_constants(settings, place) for place, number in enumerate(numbers)}
    return NgramShape(
        hashes=hashes,
        embed=text.integer("ple_embed_dim", default=text.integer("hidden_size")),
        size=settings.size,
        heads=settings.heads,
        conv_kernel=text.integer("ple_conv_kernel_size", default=4, least=2),
        padded_rows={
            layer: -(-constants.rows // divisor) * divisor for layer, constants in hashes.items()
        },
        shards=text.integer("split_ngram_parts", default=512),
        reset_id=eos_ids[0] if eos_ids else 0,
    )


def _check_fixed_settings(text: Fields) -> None:
    """Settings with one value that this recipe computes; an absent key means that value."""
    for key, value in {
        "attention_bias": False,
        "hidden_act": "silu",
        "indexer_kv_heads": 1,
        "mtp_use_dedicated_embeddings": False,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }.items():
        text.fixed(key, value)


def _check_relations(text: Fields, geometry: Geometry) -> None:
    gdn, attention, index = geometry.gdn, geometry.attention, geometry.index
    moe, ngram = geometry.moe, geometry.ngram
    rules = (
        (
            gdn.value_heads % gdn.key_heads == 0,
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads {gdn.key_heads}",
        ),
        (
            attention.heads % attention.kv_heads == 0,
            "num_attention_heads",
            f"a multiple of num_key_value_heads {attention.kv_heads}",
        ),
        (
            attention.rotary <= index.head_dim,
            "indexer_head_dim",
            f"at least the {attention.rotary} rotary channels",
        ),
        (
            PAGE_TOKENS % index.group == 0,
            "indexer_compress_ratio",
            f"a divisor of the page size {PAGE_TOKENS}",
        ),
        (
            index.budget % index.group == 0,
            "indexer_budget",
            f"a multiple of indexer_compress_ratio {index.group}",
        ),
        (moe.top_k <= moe.experts, "num_experts_per_tok", f"at most num_experts {moe.experts}"),
        (
            moe.shared_width % moe.width == 0,
            "shared_expert_intermediate_size",
            f"a multiple of moe_intermediate_size {moe.width}",
        ),
        (
            ngram.embed % ngram.all_heads == 0,
            "ple_embed_dim",
            f"a multiple of the {ngram.all_heads} hashing heads",
        ),
        (
            all(rows % ngram.shards == 0 for rows in ngram.padded_rows.values()),
            "split_ngram_parts",
            f"a divisor of the table's rows {sorted(ngram.padded_rows.values())}",
        ),
        (geometry.num_drafter_layers in (0, 1), "mtp_num_hidden_layers", "0 or 1 drafter layer"),
        (
            bool(geometry.eos_ids) and max(geometry.eos_ids) < geometry.vocab_size,
            "eos_token_id",
            f"ids below vocab_size {geometry.vocab_size}",
        ),
    )
    for holds, key, expected in rules:
        text.require(holds, key, expected)

"""Sizes and constants of a checkpoint, read from its config.json and checked one by one.

A layer's mode follows from three lists and is never stored (`Geometry.mode`):

    ratio 0                        window only
    in kv_source_layer_ids         full: owns compressor, index keys and a selection
    in index_source_layer_ids      reindex: selects afresh among the last source's entries
    else                           reuse: the last source's entries and the last selection

A layer's ratio names the granularity of the cache it reads, not that it compresses.

Sources: README.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.device.ops.engram.buckets import bucket_layout
from flare_ray.recipes.fields import Fields

QUANTISED_GROUP = 32
"""Channels that share a scale in the model's own rounding of keys and index vectors."""


class Mode(enum.Enum):
    """What a layer's attention owns; see the module."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One latent of `head_dim` is key and value of all heads; the last `rope_dim` channels rotate.

    groups, group_rank: of the grouped output projection. window: latest positions every row sees.
    """

    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    groups: int
    group_rank: int
    window: int


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Selection of compressed entries.

    Attributes:
        candidate_layer: index source whose best blocks bound later selections; -1 = none.
        candidate_blocks, candidate_size: kept blocks, and entries per block.
    """

    heads: int
    head_dim: int
    top_k: int
    candidate_layer: int
    candidate_blocks: int
    candidate_size: int


@dataclass(frozen=True, slots=True)
class RopeShape:
    """theta: of window-only layers. The others rotate by `compressed_theta` with YaRN."""

    theta: float
    compressed_theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed experts, chosen experts, and the width of each and of the shared one."""

    experts: int
    top_k: int
    width: int
    scale: float


@dataclass(frozen=True, slots=True)
class HyperShape:
    """Residual streams and the Sinkhorn iterations that mix them."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class EngramShape:
    """Hashed n-gram tables.

    Attributes:
        layers: layers that read a table before their attention.
        rows: rows of each layer's table.
        base: the first bucket is the next prime from here on.
        max_ngram, heads, head_dim: columns are (max_ngram - 1) * heads rows of head_dim.
        pad_id: token that stands for what precedes a sequence.
        compressed_ids: ids that the token map has.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    base: int
    max_ngram: int
    heads: int
    head_dim: int
    pad_id: int
    compressed_ids: int

    @property
    def columns(self) -> int:
        """Table rows read per position."""
        return (self.max_ngram - 1) * self.heads


@dataclass(frozen=True, slots=True)
class DsparkShape:
    """The drafter.

    Attributes:
        block_tokens: block length it was trained with; serving may use another (README.md).
        noise_id: token of the block's open places.
        markov_rank: width of the transition's embedding.
        taps: target layers whose inputs are its context.
    """

    block_tokens: int
    noise_id: int
    markov_rank: int
    taps: tuple[int, ...]
    moe: MoeShape


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything the builders need to know about a checkpoint.

    Attributes:
        ratios: per target layer.
        kv_sources, index_sources: target layers.
        num_drafter_layers: DSpark stages.
        eos_ids: terminal token ids.
        norm_eps: of every RMS norm and of the stream projection.
        swiglu_limit: bound of gate and up in every feed-forward.
        rounds_keys: keys and index vectors are rounded as trained; config key
            `kv_fake_quantisation`, absent = true.
    """

    vocab_size: int
    hidden: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    num_drafter_layers: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    norm_eps: float
    swiglu_limit: float
    attention: AttentionShape
    index: IndexShape
    rope: RopeShape
    moe: MoeShape
    hyper: HyperShape
    engram: EngramShape
    dspark: DsparkShape
    rounds_keys: bool = True

    @property
    def num_layers(self) -> int:
        """Target layers."""
        return len(self.ratios)

    @property
    def context_width(self) -> int:
        """Width of the drafter's context feature: the tapped inputs side by side."""
        return len(self.dspark.taps) * self.hidden

    def mode(self, layer: int) -> Mode:
        """What a target layer's attention owns."""
        if not self.ratios[layer]:
            return Mode.WINDOW
        if layer in self.kv_sources:
            return Mode.FULL
        return Mode.REINDEX if layer in self.index_sources else Mode.REUSE

    def kv_source(self, layer: int) -> int:
        """Layer whose compressed cache `layer` reads; its ratio must not be 0."""
        return max(source for source in self.kv_sources if source <= layer)


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a checkpoint.

    Args:
        config: parsed config.json; the text settings are its `text_config` or itself.
    Raises:
        CheckpointError: names each key that is missing, mistyped, out of range, in conflict with
            another, or asks for something this recipe does not compute.
    """
    nested = config.get("text_config")
    text = Fields(nested if isinstance(nested, Mapping) else config)
    layers = text.integer("num_hidden_layers")
    stages = text.integer("num_nextn_predict_layers", default=0, least=0)
    ratios = text.integers("compress_ratios", count=layers + stages)
    hyper = HyperShape(
        streams=text.integer("hc_mult"),
        iterations=text.integer("hc_sinkhorn_iters"),
        eps=text.real("hc_eps"),
    )
    geometry = Geometry(
        vocab_size=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        ratios=ratios[:layers],
        kv_sources=text.integers("kv_source_layer_ids"),
        index_sources=text.integers("index_source_layer_ids"),
        num_drafter_layers=stages,
        max_context_tokens=text.integer("max_position_embeddings"),
        eos_ids=text.token_ids("eos_token_id", fallback=config.get("eos_token_id")),
        norm_eps=text.real("rms_norm_eps"),
        swiglu_limit=text.real("swiglu_limit"),
        attention=_attention(text),
        index=_index(text),
        rope=_rope(text),
        moe=_moe(text, "n_routed_experts", "num_experts_per_tok"),
        hyper=hyper,
        engram=_engram(text),
        dspark=_dspark(text, stages),
        rounds_keys=text.switch("kv_fake_quantisation", default=True),
    )
    _check_fixed_settings(text)
    if ratios:
        _check_sources(text, geometry)
        text.require(not any(ratios[layers:]), "compress_ratios", "0 for every drafter layer")
    _check_sizes(text, geometry)
    _check_tokens(text, geometry)
    text.raise_problems()
    return geometry


def _attention(text: Fields) -> AttentionShape:
    return AttentionShape(
        heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_rank=text.integer("q_lora_rank"),
        groups=text.integer("o_groups"),
        group_rank=text.integer("o_lora_rank"),
        window=text.integer("sliding_window"),
    )


def _index(text: Fields) -> IndexShape:
    layer = text.integer("candidate_source_layer_id", default=-1, least=-1)
    bounded = layer >= 0
    return IndexShape(
        heads=text.integer("index_n_heads"),
        head_dim=text.integer("index_head_dim"),
        top_k=text.integer("index_topk"),
        candidate_layer=layer,
        candidate_blocks=text.integer("candidate_topk_blocks", default=None if bounded else 1),
        candidate_size=text.integer("candidate_block_size", default=None if bounded else 1),
    )


def _rope(text: Fields) -> RopeShape:
    name = "rope_scaling" if text.has("rope_scaling") else "rope_parameters"
    scaling = text.nested(name)
    for key in ("type", "rope_type"):
        scaling.fixed(key, "yarn")
    shape = RopeShape(
        theta=text.real("rope_theta"),
        compressed_theta=text.real("compress_rope_theta"),
        factor=scaling.real("factor"),
        beta_fast=scaling.real("beta_fast"),
        beta_slow=scaling.real("beta_slow"),
        original_tokens=scaling.integer("original_max_position_embeddings"),
    )
    scaling.hand_problems_to(text)
    return shape


def _moe(text: Fields, experts: str, chosen: str) -> MoeShape:
    return MoeShape(
        experts=text.integer(experts),
        top_k=text.integer(chosen),
        width=text.integer("moe_intermediate_size"),
        scale=text.real("routed_scaling_factor"),
    )


def _engram(text: Fields) -> EngramShape:
    if not text.has("engram_layer_ids"):
        return EngramShape((), (), 1, 2, 1, QUANTISED_GROUP, 0, 1)
    layers = text.integers("engram_layer_ids")
    return EngramShape(
        layers=layers,
        rows=text.integers("engram_num_embeddings", count=len(layers)),
        base=text.integer("engram_vocab_size", least=2),
        max_ngram=text.integer("engram_max_ngram_size", least=2),
        heads=text.integer("engram_n_heads"),
        head_dim=text.integer("engram_head_dim"),
        pad_id=text.integer("engram_pad_token_id", least=0),
        compressed_ids=text.integer("engram_compressed_vocab_size"),
    )


def _dspark(text: Fields, stages: int) -> DsparkShape:
    if not stages:
        return DsparkShape(1, 0, 1, (), MoeShape(1, 1, 1, 1.0))
    return DsparkShape(
        block_tokens=text.integer("dspark_block_size"),
        noise_id=text.integer("dspark_noise_token_id", least=0),
        markov_rank=text.integer("dspark_markov_rank"),
        taps=text.integers("dspark_target_layer_ids"),
        moe=_moe(text, "dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    )


def _check_fixed_settings(text: Fields) -> None:
    """Settings with one value that this recipe computes; an absent key means that value."""
    for key, value in {
        "attention_bias": False,
        "hidden_act": "silu",
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
    }.items():
        text.fixed(key, value)


def _check_sources(text: Fields, geometry: Geometry) -> None:
    """Every layer finds the entries and the selection that it reads, of its own ratio."""
    ratios, layers = geometry.ratios, range(geometry.num_layers)
    for key, sources in (
        ("kv_source_layer_ids", geometry.kv_sources),
        ("index_source_layer_ids", geometry.index_sources),
    ):
        rises = list(sources) == sorted(set(sources))
        text.require(
            rises and all(layer in layers and ratios[layer] for layer in sources),
            key,
            "rising numbers of layers whose compress_ratio is not 0",
        )
    text.require(
        set(geometry.kv_sources) <= set(geometry.index_sources),
        "index_source_layer_ids",
        "every kv_source_layer_id among them",
    )
    for layer in layers:
        before = [source for source in geometry.kv_sources if source <= layer]
        text.require(
            not ratios[layer] or (bool(before) and ratios[before[-1]] == ratios[layer]),
            "compress_ratios",
            f"a kv source of ratio {ratios[layer]} at or before layer {layer}",
        )
    text.require(
        all(PAGE_TOKENS % ratio == 0 for ratio in ratios if ratio) and min(ratios) >= 0,
        "compress_ratios",
        f"0, or divisors of the page size {PAGE_TOKENS}",
    )
    index = geometry.index
    if index.candidate_layer < 0:
        return
    bounded = [s for s in geometry.index_sources if s >= index.candidate_layer]
    text.require(
        bounded[:1] == [index.candidate_layer]
        and not [s for s in geometry.kv_sources if s > index.candidate_layer],
        "candidate_source_layer_id",
        "an index source with no kv source after it",
    )
    # else a pick outside the candidates would have to be kept (README.md)
    text.require(
        (index.candidate_blocks - 1) * index.candidate_size >= index.top_k,
        "candidate_topk_blocks",
        f"enough blocks for index_topk {index.top_k} beside the newest block",
    )


def _check_sizes(text: Fields, geometry: Geometry) -> None:
    shape, index = geometry.attention, geometry.index
    text.require(
        shape.rope_dim % 2 == 0 and shape.rope_dim <= min(shape.head_dim, index.head_dim),
        "qk_rope_head_dim",
        "even, and at most head_dim and index_head_dim",
    )
    text.require(shape.heads % shape.groups == 0, "o_groups", "a divisor of num_attention_heads")
    for key, size in (("head_dim", shape.head_dim), ("index_head_dim", index.head_dim)):
        text.require(size % QUANTISED_GROUP == 0, key, f"a multiple of {QUANTISED_GROUP}")
    text.require(
        geometry.engram.head_dim % QUANTISED_GROUP == 0,
        "engram_head_dim",
        f"a multiple of {QUANTISED_GROUP}",
    )
    for key, moe in (
        ("num_experts_per_tok", geometry.moe),
        ("dspark_num_experts_per_tok", geometry.dspark.moe),
    ):
        text.require(moe.top_k <= moe.experts, key, f"at most the {moe.experts} experts")


def _check_tokens(text: Fields, geometry: Geometry) -> None:
    layers = range(geometry.num_layers)
    engram, dspark = geometry.engram, geometry.dspark
    needed = bucket_layout(
        engram.layers,
        base=engram.base,
        max_ngram=engram.max_ngram,
        heads=engram.heads,
        compressed_ids=engram.compressed_ids,
    )
    for rows, buckets in zip(engram.rows, needed, strict=False):
        text.require(
            rows >= buckets.rows,
            "engram_num_embeddings",
            f"at least {buckets.rows} for its buckets",
        )
    text.require(
        all(layer in layers for layer in engram.layers), "engram_layer_ids", "layers of the target"
    )
    text.require(
        all(tap in layers for tap in dspark.taps)
        and bool(dspark.taps) == bool(geometry.num_drafter_layers),
        "dspark_target_layer_ids",
        "layers of the target",
    )
    ids = {
        "eos_token_id": geometry.eos_ids,
        "engram_pad_token_id": (engram.pad_id,),
        "dspark_noise_token_id": (dspark.noise_id,),
    }
    for key, tokens in ids.items():
        text.require(
            all(token < geometry.vocab_size for token in tokens),
            key,
            f"ids below vocab_size {geometry.vocab_size}",
        )

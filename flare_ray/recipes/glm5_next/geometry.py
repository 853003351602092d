"""Sizes and constants of a checkpoint, read from its config.json and checked one by one.

Accepted spellings, in any mixture:
    attention of a layer    deepseek_sparse_attention | full_attention | indexed_attention
    recurrent sizes         linear_attn_config {num_heads, head_dim, ...} | linear_num_heads, ...
    layer schedule          layer_types | linear_attn_config {kda_layers, full_attn_layers}
    feed-forward schedule   mlp_layer_types | first_k_dense_replace
Where two spellings are present they must agree. A setting that asks for arithmetic this recipe does
not have (rotary positions, expert groups, shared selections) is refused by name.

Sources: README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.recipes.fields import Fields

PREFIX = "model.language_model."
"""Beginning of every text tensor's name but the vocabulary head's."""


@dataclass(frozen=True, slots=True)
class KdaShape:
    """Recurrent layers. lower_bound: the smallest log decay of one token."""

    heads: int
    head_dim: int
    conv_kernel: int
    lower_bound: float

    @property
    def keep(self) -> int:
        """History rows of the short convolution."""
        return self.conv_kernel - 1

    @property
    def width(self) -> int:
        """Channels of q, of k and of v."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Attention layers: queries of `nope_dim`, values of `value_dim`, one latent per token."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Selection of attended tokens: `top_k` tokens in pools of `pool`, plus the open pool."""

    heads: int
    head_dim: int
    top_k: int
    pool: int


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed and shared experts of a sparse layer."""

    experts: int
    top_k: int
    shared: int
    width: int
    scale: float


@dataclass(frozen=True, slots=True)
class HyperShape:
    """Residual streams and the Sinkhorn iterations that mix them."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything the builders need to know about a checkpoint.

    Attributes:
        recurrent: per target layer, True = KDA, False = indexed attention.
        sparse: per target layer, True = experts, False = one dense feed-forward.
        num_drafter_layers: MTP layers, stored after the target's.
        eos_ids: terminal token ids.
        norm_eps: of every RMS norm and of the stream projection.
        swiglu_limit: bound of gate and up in every feed-forward.
    """

    vocab_size: int
    hidden: int
    dense_width: int
    recurrent: tuple[bool, ...]
    sparse: tuple[bool, ...]
    num_drafter_layers: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    norm_eps: float
    swiglu_limit: float
    kda: KdaShape
    mla: MlaShape
    index: IndexShape
    moe: MoeShape
    hyper: HyperShape

    @property
    def num_layers(self) -> int:
        """Target layers."""
        return len(self.recurrent)

    def layer_prefix(self, layer: int) -> str:
        """Beginning of a layer's tensor names; the drafter's layer is `num_layers`."""
        return f"{PREFIX}layers.{layer}."


def read_geometry(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a checkpoint.

    Args:
        config: parsed config.json; the text settings are its `text_config` or itself.
    Raises:
        CheckpointError: names each key that is missing, mistyped, out of range, in conflict with
            another spelling, or asks for something this recipe does not compute.
    """
    nested = config.get("text_config")
    text = Fields(nested if isinstance(nested, Mapping) else config)
    layers = text.integer("num_hidden_layers")
    kda, recurrent = _recurrent_layers(text, layers)
    geometry = Geometry(
        vocab_size=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        dense_width=text.integer("intermediate_size"),
        recurrent=recurrent,
        sparse=_sparse_layers(text, layers),
        num_drafter_layers=text.integer("num_nextn_predict_layers", default=0, least=0),
        max_context_tokens=text.integer("max_position_embeddings"),
        eos_ids=text.token_ids("eos_token_id", fallback=config.get("eos_token_id")),
        norm_eps=text.real("rms_norm_eps"),
        swiglu_limit=text.real("swiglu_limit"),
        kda=kda,
        mla=MlaShape(
            heads=text.integer("num_attention_heads"),
            q_rank=text.integer("q_lora_rank"),
            kv_rank=text.integer("kv_lora_rank"),
            nope_dim=text.integer("qk_nope_head_dim"),
            value_dim=text.integer("v_head_dim"),
        ),
        index=IndexShape(
            heads=text.integer("index_n_heads"),
            head_dim=text.integer("index_head_dim"),
            top_k=text.integer("index_topk"),
            pool=text.integer("index_kpool"),
        ),
        moe=MoeShape(
            experts=text.integer("n_routed_experts"),
            top_k=text.integer("num_experts_per_tok"),
            shared=text.integer("n_shared_experts"),
            width=text.integer("moe_intermediate_size"),
            scale=text.real("routed_scaling_factor"),
        ),
        hyper=HyperShape(
            streams=text.integer("hc_mult"),
            iterations=text.integer("hc_sinkhorn_iters"),
            eps=text.real("hc_eps"),
        ),
    )
    _check_fixed_settings(text, layers)
    _check_relations(text, geometry)
    text.raise_problems()
    return geometry


def _recurrent_layers(text: Fields, layers: int) -> tuple[KdaShape, tuple[bool, ...]]:
    nested = text.nested("linear_attn_config")
    shape = KdaShape(
        heads=text.either("linear_num_heads", nested, "num_heads", kind=int),
        head_dim=text.either("linear_head_dim", nested, "head_dim", kind=int),
        conv_kernel=text.either(
            "linear_conv_kernel_dim", nested, "short_conv_kernel_size", kind=int
        ),
        lower_bound=text.either("linear_lower_bound", nested, "gate_lower_bound", kind=float),
    )
    listed = text.layer_kinds(
        "layer_types",
        layers,
        {
            "linear_attention": True,
            "deepseek_sparse_attention": False,
            "full_attention": False,
            "indexed_attention": False,
        },
    )
    numbered = nested.layer_numbers("kda_layers", "full_attn_layers", layers)
    nested.hand_problems_to(text)
    if listed is None and numbered is None:
        text.missing("layer_types", "one attention kind per layer")
        return shape, (True,) * layers
    if listed is not None and numbered is not None and listed != numbered:
        text.conflict("layer_types", "linear_attn_config.kda_layers")
    return shape, listed if listed is not None else numbered or ()


def _sparse_layers(text: Fields, layers: int) -> tuple[bool, ...]:
    listed = text.layer_kinds("mlp_layer_types", layers, {"dense": False, "sparse": True})
    counted = None
    if text.has("first_k_dense_replace"):
        dense = text.integer("first_k_dense_replace", least=0)
        counted = tuple(layer >= dense for layer in range(layers))
    if listed is None and counted is None:
        text.missing("mlp_layer_types", "dense or sparse per layer, or first_k_dense_replace")
        return (True,) * layers
    if listed is not None and counted is not None and listed != counted:
        text.conflict("mlp_layer_types", "first_k_dense_replace")
    return listed if listed is not None else counted or ()


def _check_fixed_settings(text: Fields, layers: int) -> None:
    """Settings with one value that this recipe computes; an absent key means that value."""
    for key, value in {
        "attention_bias": False,
        "hidden_act": "silu",
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "mhc": True,
        "mla_use_nope": True,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "norm_topk_prob": True,
        "qk_rope_head_dim": 0,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "indexer_types": ["full"] * layers,
    }.items():
        text.fixed(key, value)


def _check_relations(text: Fields, geometry: Geometry) -> None:
    index, moe, mla = geometry.index, geometry.moe, geometry.mla
    text.require(
        text.integer("num_key_value_heads", default=mla.heads) == mla.heads,
        "num_key_value_heads",
        f"{mla.heads}, as num_attention_heads",
    )
    text.require(
        text.integer("qk_head_dim", default=mla.nope_dim) == mla.nope_dim,
        "qk_head_dim",
        f"{mla.nope_dim}, as qk_nope_head_dim without rotary part",
    )
    text.require(
        PAGE_TOKENS % index.pool == 0,
        "index_kpool",
        f"a divisor of the page size {PAGE_TOKENS}",
    )
    text.require(
        index.top_k % index.pool == 0, "index_topk", f"a multiple of index_kpool {index.pool}"
    )
    text.require(
        moe.top_k <= moe.experts, "num_experts_per_tok", f"at most n_routed_experts {moe.experts}"
    )
    bound = geometry.kda.lower_bound
    text.require(bound < 0, "linear_lower_bound", "below 0")
    # one token's decay must stay within what float32 can undo (ops/kda/chunked.py)
    text.require(bound >= -80, "linear_lower_bound", "at least -80")
    text.require(geometry.kda.conv_kernel >= 2, "linear_conv_kernel_dim", "at least 2")
    text.require(
        geometry.num_drafter_layers in (0, 1), "num_nextn_predict_layers", "0 or 1 drafter layer"
    )
    text.require(
        all(token < geometry.vocab_size for token in geometry.eos_ids),
        "eos_token_id",
        f"ids below vocab_size {geometry.vocab_size}",
    )

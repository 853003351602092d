"""The strict manifest: every text tensor by published name, full shape and owner (contract: R5).

Experts are stored either as two tensors a layer (the bfloat16 release) or as three matrices an
expert (quantised exports): the matrices are what is required, unless the layer's two tensors are
there. Not listed: the vision tower, which `Recipe.tolerated_prefixes` lets a checkpoint hold.

Weights of the drafter's layer are named `mtp.layers.0`; engines number that layer after the
target's, and metadata about quantised modules may use either (`TensorSpec.alias`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flare_ray.recipes.declaration import COLUMNS, ROWS, Family, TensorSpec
from flare_ray.recipes.qwen4_exp.geometry import PREFIX, Geometry

EMBEDDING = f"{PREFIX}embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_MIXER = f"{PREFIX}hyper_connection_mixer"
DRAFTER = "mtp."
DRAFTER_LAYER = f"{DRAFTER}layers.0."
FUSED_GATE_UP, FUSED_DOWN = 1, 2
"""Dimension that is divided of the two tensors that hold a layer's experts."""


def manifest(geometry: Geometry) -> list[TensorSpec]:
    """All tensors of the target, then those of the drafter."""
    specs = list(_target(geometry))
    if geometry.num_drafter_layers:
        specs += _drafter(geometry)
    return specs


def hash_prefix(geometry: Geometry, layer: int) -> str:
    """Beginning of the names of a layer's hash constants and table."""
    return f"{geometry.layer_prefix(layer)}ple.ple_embedding."


def _target(geometry: Geometry) -> Iterator[TensorSpec]:
    vocabulary = (geometry.vocab_size, geometry.hidden)
    yield TensorSpec(EMBEDDING, vocabulary, "target")
    for layer, recurrent in enumerate(geometry.recurrent):
        prefix = geometry.layer_prefix(layer)
        if layer in geometry.ngram.hashes:
            yield from _ngram(geometry, layer)
        yield from _mixer(geometry, f"{prefix}attn_hyper_connection", "target")
        yield from _mixer(geometry, f"{prefix}mlp_hyper_connection", "target")
        if recurrent:
            yield from _gdn(geometry, f"{prefix}linear_attn.")
        else:
            yield from _attention(geometry, f"{prefix}self_attn.", "target")
        yield from _experts(geometry, f"{prefix}mlp.", "target")
    yield from _mixer(geometry, FINAL_MIXER, "target", injects=False)
    yield TensorSpec(HEAD, vocabulary, "target", shard_dim=ROWS)


def _drafter(geometry: Geometry) -> Iterator[TensorSpec]:
    hidden = geometry.hidden
    square = (hidden, hidden)
    yield TensorSpec(f"{DRAFTER}pre_fc_norm_embedding.weight", (hidden,), "drafter")
    yield TensorSpec(f"{DRAFTER}pre_fc_norm_hidden.weight", (geometry.flat,), "drafter")
    yield TensorSpec(f"{DRAFTER}fc_embedding.weight", square, "drafter")
    yield TensorSpec(f"{DRAFTER}fc_hidden.weight", square, "drafter")
    numbered = f"{DRAFTER}layers.{geometry.num_layers}."
    for spec in (
        *_mixer(geometry, f"{DRAFTER_LAYER}attn_hyper_connection", "drafter"),
        *_mixer(geometry, f"{DRAFTER_LAYER}mlp_hyper_connection", "drafter"),
        *_attention(geometry, f"{DRAFTER_LAYER}self_attn.", "drafter"),
        *_experts(geometry, f"{DRAFTER_LAYER}mlp.", "drafter"),
    ):
        yield replace(spec, alias=spec.name.replace(DRAFTER_LAYER, numbered, 1))
    yield from _mixer(geometry, f"{DRAFTER}hyper_connection_mixer", "drafter", injects=False)


def _mixer(
    geometry: Geometry, prefix: str, family: Family, *, injects: bool = True
) -> Iterator[TensorSpec]:
    flat, rank = geometry.flat, geometry.mixer_rank
    yield TensorSpec(f"{prefix}.hc_norm.weight", (flat,), family)
    yield TensorSpec(f"{prefix}.input_mix_weight_down.weight", (rank, flat), family)
    yield TensorSpec(f"{prefix}.input_mix_weight_up.weight", (flat, rank), family)
    if injects:
        shape = (geometry.streams, flat)
        yield TensorSpec(f"{prefix}.block_inject_weight.weight", shape, family)


def _gdn(geometry: Geometry, prefix: str) -> Iterator[TensorSpec]:
    """Quantisable are the three wide matrices."""
    gdn, hidden = geometry.gdn, geometry.hidden
    heads, channels = gdn.value_heads, 2 * gdn.key_width + gdn.value_width

    def rows(name: str, *shape: int, packed: bool = False) -> TensorSpec:
        return TensorSpec(f"{prefix}{name}", shape, "target", quantisable=packed, shard_dim=ROWS)

    yield rows("in_proj_qkv.weight", channels, hidden, packed=True)
    yield rows("in_proj_z.weight", gdn.value_width, hidden, packed=True)
    yield rows("in_proj_b.weight", heads, hidden)
    yield rows("in_proj_a.weight", heads, hidden)
    yield rows("conv1d.weight", channels, 1, gdn.conv_kernel)
    yield rows("A_log", heads)
    yield rows("dt_bias", heads)
    yield TensorSpec(f"{prefix}norm.weight", (gdn.value_dim,), "target")
    yield TensorSpec(
        f"{prefix}out_proj.weight",
        (hidden, gdn.value_width),
        "target",
        quantisable=True,
        shard_dim=COLUMNS,
    )


def _attention(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    shape, index, hidden = geometry.attention, geometry.index, geometry.hidden
    width = shape.heads * shape.head_dim

    def matrix(name: str, size: tuple[int, int], shard_dim: int, limit: int = 0) -> TensorSpec:
        name = f"{prefix}{name}.weight"
        return TensorSpec(
            name, size, family, quantisable=True, shard_dim=shard_dim, shard_limit=limit
        )

    keys = (shape.kv_heads * shape.head_dim, hidden)
    yield matrix("q_proj", (2 * width, hidden), ROWS)
    yield matrix("k_proj", keys, ROWS, shape.kv_heads)
    yield matrix("v_proj", keys, ROWS, shape.kv_heads)
    yield matrix("o_proj", (hidden, width), COLUMNS)
    yield TensorSpec(f"{prefix}q_norm.weight", (shape.head_dim,), family)
    yield TensorSpec(f"{prefix}k_norm.weight", (shape.head_dim,), family)
    indexer, dim = f"{prefix}indexer.", index.head_dim
    joint = ((index.heads + 1) * dim, hidden)
    yield TensorSpec(f"{indexer}index_qk_proj.weight", joint, family)
    yield TensorSpec(f"{indexer}q_layernorm.weight", (dim,), family)
    yield TensorSpec(f"{indexer}k_layernorm.weight", (dim,), family)


def _experts(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    moe, hidden = geometry.moe, geometry.hidden
    experts = f"{prefix}experts."
    yield TensorSpec(f"{prefix}gate.weight", (moe.experts, hidden), family, wide=True)
    gate_up, down = f"{experts}gate_up_proj", f"{experts}down_proj"
    for name, shape, dim in (
        (gate_up, (moe.experts, 2 * moe.width, hidden), FUSED_GATE_UP),
        (down, (moe.experts, hidden, moe.width), FUSED_DOWN),
    ):
        yield TensorSpec(name, shape, family, required=False, shard_dim=dim)
    for expert in range(moe.experts):
        for spec in _feed_forward(f"{experts}{expert}.", hidden, moe.width, family):
            yield replace(spec, instead=down if "down_proj" in spec.name else gate_up)
    yield from _feed_forward(f"{prefix}shared_expert.", hidden, moe.shared_width, family)
    yield TensorSpec(f"{prefix}shared_expert_gate.weight", (1, hidden), family)


def _feed_forward(prefix: str, hidden: int, width: int, family: Family) -> Iterator[TensorSpec]:
    for name, shape, shard_dim in (
        ("gate_proj", (width, hidden), ROWS),
        ("up_proj", (width, hidden), ROWS),
        ("down_proj", (hidden, width), COLUMNS),
    ):
        yield TensorSpec(
            f"{prefix}{name}.weight", shape, family, quantisable=True, shard_dim=shard_dim
        )


def _ngram(geometry: Geometry, layer: int) -> Iterator[TensorSpec]:
    ngram, hidden, flat = geometry.ngram, geometry.hidden, geometry.flat
    prefix, hashing = f"{geometry.layer_prefix(layer)}ple.", hash_prefix(geometry, layer)
    for name, shape in (
        ("key_proj", (flat, ngram.embed)),
        ("value_proj", (hidden, ngram.embed)),
        ("norm_key", (flat,)),
        ("norm_query", (flat,)),
        ("norm_conv", (flat,)),
        ("conv1d", (flat, 1, ngram.conv_kernel)),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", shape, "target")
    for name, size in (
        ("layer_multipliers", ngram.size),
        ("ngram_heads_vocab_sizes", ngram.all_heads),
        ("ngram_heads_offsets", ngram.all_heads),
    ):
        yield TensorSpec(f"{hashing}{name}", (size,), "target", integer=True)
    shard = (ngram.padded_rows[layer] // ngram.shards, ngram.embed // ngram.all_heads)
    scale = f"{hashing}ngram_embedding.weight_scale"
    for number in range(ngram.shards):
        name = f"{hashing}ngram_embedding.shard_{number}.weight"
        yield TensorSpec(name, shard, "target", shard_dim=ROWS, table=True, shared_scale=scale)

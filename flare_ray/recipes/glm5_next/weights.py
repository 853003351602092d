"""The strict manifest: every text tensor by published name, full shape and owner (contract: R5).

Not listed: the vision tower, which `Recipe.tolerated_prefixes` lets a checkpoint hold. Listed as
tolerated: the drafter's own embedding and vocabulary head, which published checkpoints leave out
because the target's serve it; where present they win.
"""

from __future__ import annotations

from collections.abc import Iterator

from flare_ray.recipes.declaration import COLUMNS, ROWS, Family, TensorSpec
from flare_ray.recipes.glm5_next.geometry import PREFIX, Geometry

EMBEDDING = f"{PREFIX}embed_tokens.weight"
FINAL_NORM = f"{PREFIX}norm.weight"
HEAD = "lm_head.weight"


def manifest(geometry: Geometry) -> list[TensorSpec]:
    """All tensors of the target, then those of the drafter."""
    return [*_target(geometry), *_drafter(geometry)]


def drafter_embedding(geometry: Geometry) -> str:
    """Name of the drafter's own embedding, if a checkpoint has one."""
    return f"{geometry.layer_prefix(geometry.num_layers)}embed_tokens.weight"


def drafter_head(geometry: Geometry) -> str:
    """Name of the drafter's own vocabulary head, if a checkpoint has one."""
    return f"{geometry.layer_prefix(geometry.num_layers)}shared_head.head.weight"


def _target(geometry: Geometry) -> Iterator[TensorSpec]:
    vocabulary = (geometry.vocab_size, geometry.hidden)
    yield TensorSpec(EMBEDDING, vocabulary, "target")
    for layer in range(geometry.num_layers):
        prefix = geometry.layer_prefix(layer)
        yield from _norms(geometry, prefix, "target")
        yield from _hyper(geometry, prefix)
        if geometry.recurrent[layer]:
            yield from _kda(geometry, f"{prefix}self_attn.")
        else:
            yield from _mla(geometry, f"{prefix}self_attn.", "target")
        if geometry.sparse[layer]:
            yield from _experts(geometry, f"{prefix}mlp.", "target")
        else:
            yield from _feed_forward(
                f"{prefix}mlp.", geometry.hidden, geometry.dense_width, "target"
            )
    yield TensorSpec(FINAL_NORM, (geometry.hidden,), "target")
    yield TensorSpec(HEAD, vocabulary, "target", shard_dim=ROWS)


def _drafter(geometry: Geometry) -> Iterator[TensorSpec]:
    hidden, vocabulary = geometry.hidden, (geometry.vocab_size, geometry.hidden)
    for layer in range(geometry.num_layers, geometry.num_layers + geometry.num_drafter_layers):
        prefix = geometry.layer_prefix(layer)
        yield TensorSpec(f"{prefix}enorm.weight", (hidden,), "drafter")
        yield TensorSpec(f"{prefix}hnorm.weight", (hidden,), "drafter")
        yield TensorSpec(
            f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "drafter", quantisable=True
        )
        yield from _norms(geometry, prefix, "drafter")
        yield from _mla(geometry, f"{prefix}self_attn.", "drafter")
        yield from _experts(geometry, f"{prefix}mlp.", "drafter")
        yield TensorSpec(f"{prefix}shared_head.norm.weight", (hidden,), "drafter")
        yield TensorSpec(drafter_embedding(geometry), vocabulary, "drafter", required=False)
        yield TensorSpec(
            drafter_head(geometry), vocabulary, "drafter", required=False, shard_dim=ROWS
        )


def _norms(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}input_layernorm.weight", (geometry.hidden,), family)
    yield TensorSpec(f"{prefix}post_attention_layernorm.weight", (geometry.hidden,), family)


def _hyper(geometry: Geometry, prefix: str) -> Iterator[TensorSpec]:
    streams = geometry.hyper.streams
    rows = (2 + streams) * streams
    for site in ("attn", "ffn"):
        name = f"{prefix}hc_{site}"
        yield TensorSpec(f"{name}_fn", (rows, streams * geometry.hidden), "target", wide=True)
        yield TensorSpec(f"{name}_base", (rows,), "target", wide=True)
        yield TensorSpec(f"{name}_scale", (3,), "target", wide=True)


def _kda(geometry: Geometry, prefix: str) -> Iterator[TensorSpec]:
    kda, hidden = geometry.kda, geometry.hidden
    width = kda.width

    def matrix(name: str, shape: tuple[int, int], shard_dim: int | None) -> TensorSpec:
        return TensorSpec(
            f"{prefix}{name}.weight", shape, "target", quantisable=True, shard_dim=shard_dim
        )

    for part in "qkv":
        yield matrix(f"{part}_proj", (width, hidden), ROWS)
        yield TensorSpec(
            f"{prefix}{part}_conv1d.weight", (width, 1, kda.conv_kernel), "target", shard_dim=ROWS
        )
    for gate in "fg":
        yield matrix(f"{gate}_a_proj", (kda.head_dim, hidden), None)
        yield matrix(f"{gate}_b_proj", (width, kda.head_dim), ROWS)
    yield matrix("b_proj", (kda.heads, hidden), ROWS)
    yield TensorSpec(f"{prefix}dt_bias", (width,), "target", shard_dim=ROWS)
    yield TensorSpec(f"{prefix}A_log", (kda.heads,), "target", shard_dim=ROWS)
    yield TensorSpec(f"{prefix}o_norm.weight", (kda.head_dim,), "target")
    yield matrix("o_proj", (hidden, width), COLUMNS)


def _mla(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    """Every projection may be quantised; the FP8 release does so to four, the demo to most."""
    mla, index, hidden = geometry.mla, geometry.index, geometry.hidden

    def matrix(name: str, shape: tuple[int, int], shard_dim: int | None = None) -> TensorSpec:
        return TensorSpec(
            f"{prefix}{name}.weight", shape, family, quantisable=True, shard_dim=shard_dim
        )

    per_head = mla.nope_dim + mla.value_dim
    yield matrix("q_a_proj", (mla.q_rank, hidden))
    yield TensorSpec(f"{prefix}q_a_layernorm.weight", (mla.q_rank,), family)
    yield matrix("q_b_proj", (mla.heads * mla.nope_dim, mla.q_rank), ROWS)
    yield matrix("kv_a_proj_with_mqa", (mla.kv_rank, hidden))
    yield TensorSpec(f"{prefix}kv_a_layernorm.weight", (mla.kv_rank,), family)
    yield matrix("kv_b_proj", (mla.heads * per_head, mla.kv_rank), ROWS)
    yield matrix("o_proj", (hidden, mla.heads * mla.value_dim), COLUMNS)
    yield matrix("indexer.wq_b", (index.heads * index.head_dim, mla.q_rank))
    yield matrix("indexer.wk", (index.head_dim, hidden))
    yield TensorSpec(f"{prefix}indexer.k_norm.weight", (index.head_dim,), family)
    yield TensorSpec(f"{prefix}indexer.k_norm.bias", (index.head_dim,), family)
    yield matrix("indexer.weights_proj", (index.heads, hidden))
    pooling = f"{prefix}indexer.index_kpool_compress"
    yield TensorSpec(f"{pooling}_gate", (index.head_dim, hidden), family)
    yield TensorSpec(f"{pooling}_ape", (index.pool, index.head_dim), family)


def _experts(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    moe, hidden = geometry.moe, geometry.hidden
    yield TensorSpec(f"{prefix}gate.weight", (moe.experts, hidden), family, wide=True)
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", (moe.experts,), family, wide=True)
    for expert in range(moe.experts):
        yield from _feed_forward(f"{prefix}experts.{expert}.", hidden, moe.width, family)
    if moe.shared:
        yield from _feed_forward(f"{prefix}shared_experts.", hidden, moe.shared * moe.width, family)


def _feed_forward(prefix: str, hidden: int, width: int, family: Family) -> Iterator[TensorSpec]:
    for name, shape, shard_dim in (
        ("gate_proj", (width, hidden), ROWS),
        ("up_proj", (width, hidden), ROWS),
        ("down_proj", (hidden, width), COLUMNS),
    ):
        yield TensorSpec(
            f"{prefix}{name}.weight", shape, family, quantisable=True, shard_dim=shard_dim
        )

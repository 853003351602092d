"""The strict manifest: every text tensor by published name, full shape and owner (contract: R5).

Names have no common prefix; drafter stages are `mtp.<stage>.`. Not listed: the vision tower and its
markers, which `Recipe.tolerated_prefixes` lets a checkpoint hold. Embedding and vocabulary head
exist once and serve the drafter too. `gate.bias_vl` routes image tokens; it is checked and left
unread until images are served (contract: R9).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from flare_ray.device.ops.engram.buckets import Buckets, bucket_layout
from flare_ray.recipes.declaration import COLUMNS, ROWS, Family, TensorSpec
from flare_ray.recipes.deepseek_v41.geometry import Geometry, Mode, MoeShape

EMBEDDING = "embed.weight"
FINAL_NORM = "norm.weight"
HEAD = "head.weight"


def layer_prefix(layer: int) -> str:
    """Beginning of a target layer's tensor names."""
    return f"layers.{layer}."


def stage_prefix(stage: int) -> str:
    """Beginning of a drafter stage's tensor names."""
    return f"mtp.{stage}."


@functools.lru_cache(maxsize=4)
def tables(geometry: Geometry) -> tuple[Buckets, ...]:
    """Columns of every Engram table, in the order of their layers."""
    engram = geometry.engram
    return bucket_layout(
        engram.layers,
        base=engram.base,
        max_ngram=engram.max_ngram,
        heads=engram.heads,
        compressed_ids=engram.compressed_ids,
    )


def manifest(geometry: Geometry) -> list[TensorSpec]:
    """All tensors of the target, then those of the drafter."""
    return [*_target(geometry), *_drafter(geometry)]


def _target(geometry: Geometry) -> Iterator[TensorSpec]:
    vocabulary = (geometry.vocab_size, geometry.hidden)
    yield TensorSpec(EMBEDDING, vocabulary, "target")
    for layer in range(geometry.num_layers):
        prefix = layer_prefix(layer)
        yield from _block(geometry, prefix, geometry.moe, "target")
        yield from _selection(geometry, layer, f"{prefix}attn.")
        if layer in geometry.engram.layers:
            yield from _engram(geometry, geometry.engram.layers.index(layer), f"{prefix}engram.")
    yield TensorSpec(FINAL_NORM, (geometry.hidden,), "target")
    yield TensorSpec(HEAD, vocabulary, "target", shard_dim=ROWS, wide=True)


def _drafter(geometry: Geometry) -> Iterator[TensorSpec]:
    dspark, hidden = geometry.dspark, geometry.hidden
    stages = geometry.num_drafter_layers
    for stage in range(stages):
        yield from _block(geometry, stage_prefix(stage), dspark.moe, "drafter")
    if not stages:
        return
    first, last = stage_prefix(0), stage_prefix(stages - 1)
    yield _matrix(f"{first}main_proj", (hidden, geometry.context_width), "drafter", packed=True)
    yield TensorSpec(f"{first}main_norm.weight", (hidden,), "drafter")
    yield TensorSpec(f"{last}norm.weight", (hidden,), "drafter")
    transition = (geometry.vocab_size, dspark.markov_rank)
    yield _matrix(f"{last}markov_head.embed", transition, "drafter")
    yield _matrix(f"{last}markov_head.head", transition, "drafter", shard_dim=ROWS, wide=True)
    confidence = (1, hidden + dspark.markov_rank)
    yield _matrix(f"{last}confidence_head.proj", confidence, "drafter")


def _matrix(
    name: str,
    shape: tuple[int, int],
    family: Family,
    *,
    shard_dim: int | None = None,
    packed: bool = False,
    wide: bool = False,
) -> TensorSpec:
    return TensorSpec(
        f"{name}.weight", shape, family, quantisable=packed, shard_dim=shard_dim, wide=wide
    )


def _block(geometry: Geometry, prefix: str, moe: MoeShape, family: Family) -> Iterator[TensorSpec]:
    """What target layers and drafter stages share."""
    for name in ("attn_norm", "ffn_norm"):
        yield TensorSpec(f"{prefix}{name}.weight", (geometry.hidden,), family)
    streams = geometry.hyper.streams
    rows = (2 + streams) * streams
    for site in ("attn", "ffn"):
        name = f"{prefix}hc_{site}"
        yield TensorSpec(f"{name}_fn", (rows, streams * geometry.hidden), family, wide=True)
        yield TensorSpec(f"{name}_base", (rows,), family, wide=True)
        yield TensorSpec(f"{name}_scale", (3,), family, wide=True)
    yield from _attention(geometry, f"{prefix}attn.", family)
    yield from _experts(geometry, f"{prefix}ffn.", moe, family)


def _attention(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    shape, hidden = geometry.attention, geometry.hidden
    queries = shape.heads * shape.head_dim
    ranks = shape.groups * shape.group_rank
    yield _matrix(f"{prefix}wq_a", (shape.q_rank, hidden), family, packed=True)
    yield TensorSpec(f"{prefix}q_norm.weight", (shape.q_rank,), family)
    yield _matrix(f"{prefix}wq_b", (queries, shape.q_rank), family, shard_dim=ROWS, packed=True)
    yield _matrix(f"{prefix}wkv", (shape.head_dim, hidden), family, packed=True)
    yield TensorSpec(f"{prefix}kv_norm.weight", (shape.head_dim,), family)
    inputs = queries // shape.groups
    yield _matrix(f"{prefix}wo_a", (ranks, inputs), family, shard_dim=ROWS, packed=True)
    yield _matrix(f"{prefix}wo_b", (hidden, ranks), family, shard_dim=COLUMNS, packed=True)
    yield TensorSpec(f"{prefix}attn_sink", (shape.heads,), family, shard_dim=ROWS)


def _selection(geometry: Geometry, layer: int, prefix: str) -> Iterator[TensorSpec]:
    """Compressor and indexer, whole on every rank: equal inputs give equal selections."""
    mode, shape, index = geometry.mode(layer), geometry.attention, geometry.index
    if mode is Mode.FULL:
        latent = (shape.head_dim, geometry.hidden)
        wide = geometry.ratios[layer] > 1
        yield _matrix(f"{prefix}compressor.wkv", latent, "target", wide=wide)
        yield TensorSpec(f"{prefix}compressor.norm.weight", (shape.head_dim,), "target")
        if wide:
            yield _matrix(f"{prefix}compressor.wgate", latent, "target", wide=True)
        yield _matrix(f"{prefix}indexer.wk", (index.head_dim, shape.head_dim), "target")
        yield TensorSpec(f"{prefix}indexer.k_norm.weight", (index.head_dim,), "target")
    if mode in (Mode.FULL, Mode.REINDEX):
        queries = (index.heads * index.head_dim, shape.q_rank)
        yield _matrix(f"{prefix}indexer.wq_b", queries, "target", packed=True)
        yield _matrix(f"{prefix}indexer.weights_proj", (index.heads, geometry.hidden), "target")


def _engram(geometry: Geometry, place: int, prefix: str) -> Iterator[TensorSpec]:
    engram, hidden, streams = geometry.engram, geometry.hidden, geometry.hyper.streams
    buckets = tables(geometry)[place].primes
    yield TensorSpec(
        f"{prefix}embed.weight",
        (engram.rows[place], engram.head_dim),
        "target",
        quantisable=True,
        shard_dim=ROWS,
        # rows behind the last bucket, if any, are never read
        shard_sizes=(*buckets[:-1], engram.rows[place] - sum(buckets[:-1])),
        table=True,
    )
    joint = (hidden * (streams + 1), engram.columns * engram.head_dim)
    yield _matrix(f"{prefix}wkv", joint, "target", packed=True)
    for side in "qk":
        yield TensorSpec(f"{prefix}{side}_weight", (streams, hidden), "target", wide=True)


def _experts(
    geometry: Geometry, prefix: str, moe: MoeShape, family: Family
) -> Iterator[TensorSpec]:
    hidden = geometry.hidden
    yield _matrix(f"{prefix}gate", (moe.experts, hidden), family, wide=True)
    yield TensorSpec(f"{prefix}gate.bias", (moe.experts,), family, wide=True)
    yield TensorSpec(f"{prefix}gate.bias_vl", (moe.experts,), family, required=False)
    names = [f"experts.{expert}" for expert in range(moe.experts)]
    for name in (*names, "shared_experts"):
        for part, shape, dim in (
            ("w1", (moe.width, hidden), ROWS),
            ("w3", (moe.width, hidden), ROWS),
            ("w2", (hidden, moe.width), COLUMNS),
        ):
            yield _matrix(f"{prefix}{name}.{part}", shape, family, shard_dim=dim, packed=True)

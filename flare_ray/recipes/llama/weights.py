"""The strict manifest: every tensor by published name, full shape and owner (contract: R5).

Attention is divided by key heads, each with its query heads: where a degree does not divide them,
ranks are filled up with heads of zeros (blocks.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from flare_ray.recipes.declaration import COLUMNS, ROWS, Family, TensorSpec
from flare_ray.recipes.llama.geometry import Geometry

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
DRAFT_TOKENS = "shared_head.tokens"
"""Behind the drafter's prefix: ids that it may propose, ascending."""


def manifest(geometry: Geometry) -> list[TensorSpec]:
    """All tensors of the target, then those of the drafter, if there is one."""
    specs = list(_target(geometry))
    for layer in range(geometry.num_layers, geometry.num_layers + geometry.num_drafter_layers):
        specs += _drafter(geometry, geometry.layer_prefix(layer))
    return specs


def _target(geometry: Geometry) -> Iterator[TensorSpec]:
    vocabulary = (geometry.vocab_size, geometry.hidden)
    yield TensorSpec(EMBEDDING, vocabulary, "target")
    for layer in range(geometry.num_layers):
        yield from _layer(geometry, geometry.layer_prefix(layer), "target")
    yield TensorSpec(FINAL_NORM, (geometry.hidden,), "target")
    # Some exports store the tied head once more; it must not be asked for, and may be there.
    yield TensorSpec(HEAD, vocabulary, "target", required=not geometry.tied, shard_dim=ROWS)


def _drafter(geometry: Geometry, prefix: str) -> Iterator[TensorSpec]:
    hidden = geometry.hidden
    yield TensorSpec(f"{prefix}enorm.weight", (hidden,), "drafter")
    yield TensorSpec(f"{prefix}hnorm.weight", (hidden,), "drafter")
    yield TensorSpec(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "drafter", quantisable=True)
    yield from _layer(geometry, prefix, "drafter")
    yield TensorSpec(f"{prefix}shared_head.norm.weight", (hidden,), "drafter")
    if geometry.draft_vocab_size:
        shape = (geometry.draft_vocab_size,)
        yield TensorSpec(f"{prefix}{DRAFT_TOKENS}", shape, "drafter", integer=True)


def _layer(geometry: Geometry, prefix: str, family: Family) -> Iterator[TensorSpec]:
    hidden, shape = geometry.hidden, geometry.attention
    groups = (shape.group * shape.head_dim,) * shape.kv_heads
    keys = (shape.head_dim,) * shape.kv_heads
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{name}.weight", (hidden,), family)
    for name, size, dim, parts in (
        ("q_proj", (sum(groups), hidden), ROWS, groups),
        ("k_proj", (sum(keys), hidden), ROWS, keys),
        ("v_proj", (sum(keys), hidden), ROWS, keys),
        ("o_proj", (hidden, sum(groups)), COLUMNS, groups),
    ):
        yield TensorSpec(
            f"{prefix}self_attn.{name}.weight",
            size,
            family,
            quantisable=True,
            shard_dim=dim,
            shard_sizes=parts,
            padded=True,
        )
    for name, size, dim in (
        ("gate_proj", (geometry.width, hidden), ROWS),
        ("up_proj", (geometry.width, hidden), ROWS),
        ("down_proj", (hidden, geometry.width), COLUMNS),
    ):
        yield TensorSpec(
            f"{prefix}mlp.{name}.weight", size, family, quantisable=True, shard_dim=dim
        )

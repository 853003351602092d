"""All per-request state of one rank (contract: M1, M2).

One group per layer and purpose, named `layers.<n>.<purpose>`:

    recurrent   replayed  delta-rule matrices before the last round, this rank's value heads
    corrections, key_rows, decays   record  what each row of the last round did to them
    window      window  raw q, k, v rows before the short convolution, this rank's channels
    keys        page    attention keys after rotation, this rank's key heads
    values      page    attention values
    pooled      page    one index key per finished group of positions
    tail        ring    raw index keys of the last positions, from which groups are finished
    tokens      window  token ids before the newest, for the n-gram hash
    grams       window  normalised rows before the dilated convolution of the n-gram embedding

The drafter's layer is numbered after the target's. Index keys and rings are whole on every rank,
recurrent state and attention caches are divided by heads; where there are more ranks than key
heads, several ranks keep the same one.

Why the ring is longer than a group: a round of W <= 8 rows may be rejected but for its first row,
and the open group's earlier rows, at most `group` - 2 that the first row does not finish, must
survive that; hence entries >= group - 2 + 8, rounded up to whole groups: twelve for groups of four.
The drafter's own rows (up to seven, from the pair at N - 1 on) reach no further.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.recipes.declaration import Family, StateGroup, StateSpec
from flare_ray.recipes.fields import check_shared
from flare_ray.recipes.qwen4_exp.geometry import Geometry

RECORDS = ("corrections", "key_rows", "decays")
"""Purposes of the groups that hold a round's records."""
Kind = Literal["column", "replayed", "record"]


def group_name(layer: int, purpose: str) -> str:
    """Key in the state store."""
    return f"layers.{layer}.{purpose}"


def ring_entries(group: int) -> int:
    """Entries of a tail ring that survives any rejected round, a multiple of `group`."""
    return -(-(max(group - 2, 0) + MAX_WIDTH) // group) * group


def check_divisible(geometry: Geometry, world_size: int) -> None:
    """Refuse a TP degree that some divided size does not admit.

    Raises:
        ConfigError: names every such size.
    """
    sizes = {
        "linear_num_key_heads": geometry.gdn.key_heads,
        "num_attention_heads": geometry.attention.heads,
        "moe_intermediate_size": geometry.moe.width,
        "vocab_size": geometry.vocab_size,
    }
    for rows in geometry.ngram.padded_rows.values():
        sizes["rows of a split_ngram_parts tensor"] = rows // geometry.ngram.shards
    kv_heads = geometry.attention.kv_heads
    repeats = kv_heads % world_size == 0 or world_size % kv_heads == 0
    wrong = () if repeats else (f"num_key_value_heads {kv_heads}",)
    check_shared(sizes, world_size, also=wrong)


def kv_parts(geometry: Geometry, world_size: int) -> int:
    """Parts that the key and value heads are divided into."""
    return min(geometry.attention.kv_heads, world_size)


def state_spec(geometry: Geometry, world_size: int) -> StateSpec:
    """State of one rank.

    Raises:
        ConfigError: some heads cannot be shared by `world_size` ranks.
    """
    check_divisible(geometry, world_size)
    groups: list[StateGroup] = []
    for layer, recurrent in enumerate(geometry.recurrent):
        if layer in geometry.ngram.hashes:
            groups += _ngram(geometry, layer)
        if recurrent:
            groups += _recurrent(geometry, layer, world_size)
        else:
            groups += _attention(geometry, layer, world_size, "target")
    for layer in range(geometry.num_layers, geometry.num_layers + geometry.num_drafter_layers):
        groups += _attention(geometry, layer, world_size, "drafter")
    return StateSpec(
        groups=tuple(groups), feedback_width=geometry.flat, sampling_width=geometry.hidden
    )


def _recurrent(geometry: Geometry, layer: int, world_size: int) -> list[StateGroup]:
    gdn, sharded = geometry.gdn, world_size > 1
    heads = gdn.value_heads // world_size

    def group(purpose: str, kind: Kind, *shape: int) -> StateGroup:
        name = group_name(layer, purpose)
        return StateGroup(name, kind, shape, "target", dtype="float32", sharded=sharded)

    window = StateGroup(
        name=group_name(layer, "window"),
        kind="window",
        shape=((2 * gdn.key_width + gdn.value_width) // world_size,),
        family="target",
        keep=gdn.keep,
        sharded=sharded,
    )
    state = (heads, gdn.key_dim, gdn.value_dim)
    if geometry.recurrence == "columns":
        return [group("recurrent", "column", *state), window]
    corrections, keys, decays = (group_name(layer, purpose) for purpose in RECORDS)
    return [
        replace(group("recurrent", "replayed", *state), records=(corrections, keys, decays)),
        group("corrections", "record", heads, gdn.value_dim),
        group("key_rows", "record", gdn.key_heads // world_size, gdn.key_dim),
        group("decays", "record", heads),
        window,
    ]


def _attention(geometry: Geometry, layer: int, world_size: int, family: Family) -> list[StateGroup]:
    shape, index = geometry.attention, geometry.index
    parts = kv_parts(geometry, world_size)
    cached = (PAGE_TOKENS, shape.kv_heads // parts, shape.head_dim)
    return [
        *(
            StateGroup(
                name=group_name(layer, purpose),
                kind="page",
                shape=cached,
                family=family,
                sharded=parts > 1,
            )
            for purpose in ("keys", "values")
        ),
        StateGroup(
            name=group_name(layer, "pooled"),
            kind="page",
            shape=(PAGE_TOKENS // index.group, index.head_dim),
            family=family,
        ),
        StateGroup(
            name=group_name(layer, "tail"),
            kind="ring",
            shape=(index.head_dim,),
            family=family,
            entries=ring_entries(index.group),
        ),
    ]


def _ngram(geometry: Geometry, layer: int) -> list[StateGroup]:
    ngram = geometry.ngram
    return [
        StateGroup(
            name=group_name(layer, "tokens"),
            kind="window",
            shape=(),
            family="target",
            dtype="int64",
            keep=ngram.size - 1,
        ),
        StateGroup(
            name=group_name(layer, "grams"),
            kind="window",
            shape=(geometry.flat,),
            family="target",
            keep=ngram.keep,
        ),
    ]

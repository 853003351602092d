"""All per-request state of one rank (contract: M1, M2).

One group per layer and purpose, named `layers.<n>.<purpose>`:

    recurrent   column  KDA matrices, one saved per verification row, this rank's heads
    window      window  raw q, k, v rows before the short convolution, this rank's channels
    latent      page    attention cache, one latent per position
    pooled      page    one key per finished pool of positions
    tail        ring    (key, gate) of the last positions, from which pools are finished

The drafter's layer is numbered after the target's. Latents, pools and rings are whole on every
rank, recurrent state is divided by heads.

Why the ring is longer than a pool: a round of W <= 8 rows may be rejected but for its first row,
and the open pool's earlier rows, at most `pool` - 2 that the first row does not finish, must
survive that; hence entries >= pool - 2 + 8, rounded up to whole pools: twelve for pools of four.
The drafter's own rows (up to seven, from the pair at N - 1 on) reach no further.
"""

from __future__ import annotations

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, StateGroup, StateSpec
from flare_ray.recipes.glm5_next.geometry import Geometry


def group_name(layer: int, purpose: str) -> str:
    """Key in the state store."""
    return f"layers.{layer}.{purpose}"


def ring_entries(pool: int) -> int:
    """Entries of a tail ring that survives any rejected round, a multiple of `pool`."""
    return -(-(max(pool - 2, 0) + MAX_WIDTH) // pool) * pool


def state_spec(geometry: Geometry, world_size: int) -> StateSpec:
    """State of one rank.

    Raises:
        ConfigError: the recurrent heads cannot be shared by `world_size` ranks.
    """
    if geometry.kda.heads % world_size:
        raise ConfigError(
            f"{geometry.kda.heads} recurrent heads cannot be shared by {world_size} ranks; choose "
            "another tensor_parallel_size"
        )
    groups: list[StateGroup] = []
    for layer, recurrent in enumerate(geometry.recurrent):
        if recurrent:
            groups += _recurrent(geometry, layer, world_size)
        else:
            groups += _indexed(geometry, layer, "target")
    for layer in range(geometry.num_layers, geometry.num_layers + geometry.num_drafter_layers):
        groups += _indexed(geometry, layer, "drafter")
    return StateSpec(
        groups=tuple(groups), feedback_width=geometry.hidden, sampling_width=geometry.hidden
    )


def _recurrent(geometry: Geometry, layer: int, world_size: int) -> list[StateGroup]:
    kda = geometry.kda
    heads = kda.heads // world_size
    return [
        StateGroup(
            name=group_name(layer, "recurrent"),
            kind="column",
            shape=(heads, kda.head_dim, kda.head_dim),
            family="target",
            dtype="float32",
            sharded=world_size > 1,
        ),
        StateGroup(
            name=group_name(layer, "window"),
            kind="window",
            shape=(3 * heads * kda.head_dim,),
            family="target",
            keep=kda.keep,
            sharded=world_size > 1,
        ),
    ]


def _indexed(geometry: Geometry, layer: int, family: Family) -> list[StateGroup]:
    index = geometry.index
    return [
        StateGroup(
            name=group_name(layer, "latent"),
            kind="page",
            shape=(PAGE_TOKENS, geometry.mla.kv_rank),
            family=family,
        ),
        StateGroup(
            name=group_name(layer, "pooled"),
            kind="page",
            shape=(PAGE_TOKENS // index.pool, index.head_dim),
            family=family,
        ),
        StateGroup(
            name=group_name(layer, "tail"),
            kind="ring",
            shape=(2, index.head_dim),
            family=family,
            entries=ring_entries(index.pool),
        ),
    ]

"""State of a rank: keys and values of its key heads, paged (contract: R1)."""

from __future__ import annotations

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.recipes.declaration import StateGroup, StateSpec
from flare_ray.recipes.fields import check_shared
from flare_ray.recipes.llama.geometry import Geometry


def group_name(layer: int, purpose: str) -> str:
    """Key of a group in the state store."""
    return f"layers.{layer}.{purpose}"


def check_divisible(geometry: Geometry, world_size: int) -> None:
    """Refuse a TP degree that some divided size does not admit; heads are padded instead.

    Raises:
        ConfigError: names every such size.
    """
    sizes = {"intermediate_size": geometry.width, "vocab_size": geometry.vocab_size}
    if geometry.draft_vocab_size:
        sizes["draft_vocab_size"] = geometry.draft_vocab_size
    check_shared(sizes, world_size)


def rank_kv_heads(geometry: Geometry, world_size: int) -> int:
    """Key heads of one rank, those of zeros included."""
    return -(-geometry.attention.kv_heads // world_size)


def state_spec(geometry: Geometry, world_size: int) -> StateSpec:
    """State of one rank.

    Raises:
        ConfigError: some size cannot be shared by `world_size` ranks.
    """
    check_divisible(geometry, world_size)
    shape = (PAGE_TOKENS, rank_kv_heads(geometry, world_size), geometry.attention.head_dim)
    layers = geometry.num_layers + geometry.num_drafter_layers
    return StateSpec(
        groups=tuple(
            StateGroup(
                name=group_name(layer, purpose),
                kind="page",
                shape=shape,
                family="target" if layer < geometry.num_layers else "drafter",
                sharded=world_size > 1,
            )
            for layer in range(layers)
            for purpose in ("keys", "values")
        ),
        feedback_width=geometry.hidden,
        sampling_width=geometry.hidden,
    )

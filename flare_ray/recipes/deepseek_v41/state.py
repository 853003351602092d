"""All per-request state of one rank (contract: M1, M2).

One group per layer and purpose, `layers.<n>.<purpose>` and `mtp.<stage>.<purpose>`:

    window      ring  keys of the latest positions, rotated and rounded
    entries     page  compressed keys of a kv source, one per `ratio` positions
    index_keys  page  what its selections score
    raw         ring  (value, gate) of the latest positions, from which a ratio above 1 pools
    engram.ids  ring  compressed token ids of the latest positions

Everything is whole on every rank: there is one key head, and selections must agree.

Why rings are eight entries longer than what is read back: a round writes its W <= 8 rows before any
of them reads, and all but the first may be rejected. The first row's look-back must survive the
last one's write, and the next round starts at least one position further. So a rejected row needs
neither staging nor undoing: it lies at a position that no row sees before another has taken its
place. Pages need less: a position's entry is written again before it is seen.
"""

from __future__ import annotations

from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.recipes.declaration import StateGroup, StateSpec
from flare_ray.recipes.deepseek_v41.geometry import Geometry, Mode
from flare_ray.recipes.deepseek_v41.weights import layer_prefix, stage_prefix

ENGRAM_IDS = "engram.ids"


def ring_entries(history: int) -> int:
    """Entries of a ring whose rows read `history` positions back."""
    return history + MAX_WIDTH


def state_spec(geometry: Geometry, world_size: int) -> StateSpec:
    """State of one rank, the same at every `world_size`."""
    del world_size
    groups: list[StateGroup] = []
    for layer in range(geometry.num_layers):
        groups += _layer(geometry, layer)
    if geometry.engram.layers:
        entries = ring_entries(geometry.engram.max_ngram - 1)
        groups.append(StateGroup(ENGRAM_IDS, "ring", (), "target", dtype="int64", entries=entries))
    shape = geometry.attention
    for stage in range(geometry.num_drafter_layers):
        # the block sees `window` committed rows, and a publication may look back past a round's
        name = f"{stage_prefix(stage)}window"
        entries = ring_entries(shape.window)
        groups.append(StateGroup(name, "ring", (shape.head_dim,), "drafter", entries=entries))
    return StateSpec(
        groups=tuple(groups),
        feedback_width=geometry.context_width,
        sampling_width=geometry.hidden,
        history="rows",
    )


def _layer(geometry: Geometry, layer: int) -> list[StateGroup]:
    prefix, shape = layer_prefix(layer), geometry.attention
    entries = ring_entries(shape.window - 1)
    groups = [StateGroup(f"{prefix}window", "ring", (shape.head_dim,), "target", entries=entries)]
    if geometry.mode(layer) is not Mode.FULL:
        return groups
    ratio = geometry.ratios[layer]
    per_page = PAGE_TOKENS // ratio
    for name, width in (("entries", shape.head_dim), ("index_keys", geometry.index.head_dim)):
        groups.append(StateGroup(f"{prefix}{name}", "page", (per_page, width), "target"))
    if ratio > 1:
        groups.append(
            StateGroup(
                f"{prefix}raw",
                "ring",
                (2, shape.head_dim),
                "target",
                dtype="float32",
                entries=ring_entries(ratio - 1),
            )
        )
    return groups

"""State of the scripted model: at least one group of every kind, and the history hash they share.

H(N) = sum over i < N of (x[i] + 1) * POWER[i]   mod 2**64
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.recipes.declaration import StateGroup, StateSpec
from tests.support.scripted.geometry import Script

KEEP = 3
RING = 12
FEEDBACK = 2
SAMPLING = 4
SIGNATURE = 1 << 20
"""Signatures are taken modulo this: exact in float32."""


def state(script: Script, world_size: int) -> StateSpec:
    """Groups of one rank; nothing is sharded."""
    groups = (
        StateGroup("token_pages", "page", (PAGE_TOKENS,), "target", "int64"),
        StateGroup("hash_column", "column", (), "target", "int64"),
        StateGroup("recent_window", "window", (), "target", "activation", keep=KEEP),
        StateGroup("recent_ring", "ring", (), "target", "float32", entries=RING),
        StateGroup("total_row", "row", (), "target", "int64"),
        StateGroup("pair_pages", "page", (PAGE_TOKENS, 2), "drafter", "int64"),
        StateGroup("pair_ring", "ring", (2,), "drafter", "int64", entries=RING),
    )
    return StateSpec(groups, feedback_width=FEEDBACK, sampling_width=SAMPLING)


def powers(count: int) -> Tensor:
    """[count] int64 odd pseudo-random multipliers."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def signature(history_hash: Tensor) -> Tensor:
    """The part of a hash that travels through float32 feedback; int64 in 0 .. SIGNATURE - 1."""
    return torch.remainder(history_hash, SIGNATURE)


def page_places(page_table: Tensor, positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(page id, offset) of positions [B, T]; invalid ones lie in the null page."""
    index = torch.where(valid, torch.div(positions, PAGE_TOKENS, rounding_mode="floor"), 0)
    pages = torch.where(valid, page_table.gather(1, index), 0)
    return pages, positions % PAGE_TOKENS

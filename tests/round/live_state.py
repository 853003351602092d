"""What of a slot's state is live, as comparable values; the drafter's pairs by definition."""

from __future__ import annotations

import torch

from flare_ray.device.executor import RankExecutor
from flare_ray.device.state.layout import Core
from tests.support.scripted.harness import Request
from tests.support.scripted.state import KEEP, RING, powers, signature

GUARANTEED = RING - 8
"""Ring entries that every round leaves readable."""


def live_state(rank: RankExecutor, request: Request) -> dict[str, object]:
    """Everything a program may read of the slot, in the order of positions."""
    store = rank.store
    slot = request.slot
    core = store.request.core[slot].tolist()
    consumed, column = core[Core.CONSUMED], core[Core.COLUMN]
    pages = list(request.pages)
    pairs = max(consumed - 1, 0)
    groups = store.groups
    recent = [p % RING for p in range(max(consumed - GUARANTEED, 0), consumed)]
    recent_pairs = [p % RING for p in range(max(pairs - GUARANTEED, 0), pairs)]
    return {
        "consumed": consumed,
        "pending": core[Core.PENDING],
        "phase": core[Core.PHASE],
        "pairs": core[Core.DRAFT_POSITION],
        "tail": store.request.tail[slot].tolist(),
        "column": int(groups["hash_column"][slot, column]),
        "window": groups["recent_window"][slot, column + 1 : column + 1 + KEEP].tolist(),
        "ring": groups["recent_ring"][slot, recent].tolist(),
        "row": int(groups["total_row"][slot]),
        "tokens": groups["token_pages"][pages].flatten()[:consumed].tolist(),
        "pair_pages": groups["pair_pages"][pages].flatten(0, 1)[:pairs].tolist(),
        "pair_ring": groups["pair_ring"][slot, recent_pairs].tolist(),
    }


def pairs_of(tokens: list[int]) -> torch.Tensor:
    """[len - 1, 2] int64: the drafter's rows of a history, made from target values alone."""
    ids = torch.tensor(tokens)
    hashes = ((ids + 1) * powers(4096 + 128)[: len(tokens)]).cumsum(0)
    return torch.stack((ids[1:] + 1, signature(hashes[:-1])), dim=1)

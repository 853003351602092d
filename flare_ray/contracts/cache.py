"""What administrators see of an engine's prefix cache, and what they may reset (contract: M7)."""

from __future__ import annotations

import msgspec

from flare_ray.contracts.tiers import Tier


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier; bytes are those of one rank.

    Attributes:
        snapshots: prefixes held now.
        limit_bytes: its budget; 0 = there is no such tier.
        saved_tokens .. evicted_bytes: totals since the engine's start; a reset evicts nothing.
        corrupt_files: files that were missing, damaged or another engine's.
        stopped: why nothing more is written to it; "" while it is.
    """

    tier: str
    snapshots: int
    used_bytes: int
    limit_bytes: int
    saved_tokens: int
    saved_bytes: int
    restored_tokens: int
    restored_bytes: int
    evicted_tokens: int
    evicted_bytes: int
    corrupt_files: int = 0
    stopped: str = ""


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache of one engine.

    Attributes:
        queried_tokens: prompt tokens of requests that got a slot.
        hit_tokens: those of them that were restored instead of computed.
        moves: orders between tiers that are under way or wait.
        resets: resets since the engine's start.
        tiers: device, host, disk.
    """

    engine_id: str = ""
    queried_tokens: int
    hit_tokens: int
    moves: int
    resets: int
    tiers: tuple[TierStats, ...]


class CacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """What a reset forgot.

    Attributes:
        dropped: prefixes by tier.
        in_use: prefixes of the device tier that stay, since a request is about to start from them
            or a copy of them is under way.
    """

    engine_id: str = ""
    dropped: dict[str, int]
    in_use: int


ALL_TIERS = frozenset(Tier)

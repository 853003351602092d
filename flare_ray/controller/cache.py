"""The controller's side of the cache below the rounds: reports, orders, resets, statistics.

`receive` and `send` belong to the controller's thread and run once per iteration, before requests
are admitted and after; `stats` and `reset` may be called from any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from flare_ray.config import EngineConfig, PrefixCacheConfig
from flare_ray.contracts.cache import CacheReset, CacheStats, TierStats
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import Tier
from flare_ray.controller.catalog import serve_selection
from flare_ray.controller.paging.identity import open_disk_tier
from flare_ray.controller.paging.pool import PagePool
from flare_ray.controller.paging.prefix import PrefixIndex
from flare_ray.controller.paging.snapshots import Snapshots
from flare_ray.controller.paging.tiers import HEADER_ALLOWANCE, TierLimits, Tiers
from flare_ray.controller.ports import RankChannel
from flare_ray.errors import ConfigError


class _Reset(msgspec.Struct, frozen=True):
    tiers: frozenset[Tier]
    done: Callable[[CacheReset], None]


class PrefixCache:
    """The prefix cache of one engine as its controller drives it; nothing is kept if the settings
    say so.

    Args:
        channel: the ranks.
        clock: nanoseconds.
    Attributes:
        snapshots: which prefixes are kept and found.
    Raises:
        ConfigError: a lower tier has no room for a snapshot of one page.
        ConfigError, CapacityError: the disk tier's folder cannot be used.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        config: EngineConfig,
        pool: PagePool,
        channel: RankChannel,
        *,
        clock: Callable[[], int],
    ) -> None:
        settings = config.prefix_cache
        catalog = serve_selection(manifest, config)
        index = PrefixIndex(
            pool,
            manifest.snapshot_rows if settings.enabled else 0,
            row_bytes=manifest.snapshot_row_bytes,
            page_bytes=manifest.budget.page_bytes // manifest.num_pages,
        )
        _check_room(settings, index.bytes_for(PAGE_TOKENS))
        self._disk = open_disk_tier(config, manifest)
        self._tiers = Tiers(
            index,
            TierLimits(
                host_bytes=manifest.host_cache_bytes if settings.enabled else 0,
                disk_bytes=settings.disk_bytes,
                speculation=catalog.rounds[0].speculation,
            ),
            disk=self._disk,
            clock=clock,
        )
        self.snapshots = Snapshots(
            index,
            pool,
            self._tiers,
            inside_rounds=manifest.snapshots_inside_rounds,
            resumes=bool(catalog.resume),
        )
        self._channel = channel
        self._asked: deque[_Reset] = deque()
        self._resets = 0

    # The controller's thread.

    def receive(self) -> None:
        """Take what ranks have reported, then resets."""
        for outcome in self._channel.take_outcomes():
            self._tiers.finished(outcome)
        while self._asked:
            reset = self._asked.popleft()
            dropped = self._tiers.clear(reset.tiers)
            self._resets += 1
            in_use = len(self.snapshots.index) if Tier.DEVICE in reset.tiers else 0
            reset.done(CacheReset(dropped={str(t): n for t, n in dropped.items()}, in_use=in_use))

    def send(self) -> bool:
        """Send the moves that may begin now; whether there were any."""
        orders = self._tiers.take_orders(self.snapshots.take_saves)
        for order in orders:
            self._channel.order(order)
        return bool(orders)

    @property
    def is_moving(self) -> bool:
        """Whether snapshots are on their way between tiers, or wait for it."""
        return self._tiers.pending_moves > 0

    def take_restore_times(self) -> list[tuple[Tier, float]]:
        """(tier, seconds) of each restore since the last call."""
        times, self._tiers.restore_times = self._tiers.restore_times, []
        return times

    def close(self) -> None:
        """Leave the disk tier's directory to others; after the loop has ended. Idempotent."""
        if self._disk is not None:
            self._disk.close()

    # Any thread.

    def reset(self, tiers: frozenset[Tier], done: Callable[[CacheReset], None]) -> None:
        """Have the controller's thread forget everything in `tiers`, then call `done`; the caller
        wakes it."""
        self._asked.append(_Reset(tiers, done))

    def stats(self) -> CacheStats:
        """Counts that were true at some moment during the call."""
        snapshots = self.snapshots
        return CacheStats(
            queried_tokens=snapshots.queried_tokens,
            hit_tokens=snapshots.hit_tokens,
            moves=self._tiers.pending_moves,
            resets=self._resets,
            tiers=(self._device_stats(), self._lower(Tier.HOST), self._lower(Tier.DISK)),
        )

    def _device_stats(self) -> TierStats:
        snapshots, index = self.snapshots, self.snapshots.index
        held = len(index)
        return TierStats(
            tier=str(Tier.DEVICE),
            snapshots=held,
            used_bytes=held * index.row_bytes,
            limit_bytes=index.rows * index.row_bytes,
            saved_tokens=snapshots.saved_tokens,
            saved_bytes=snapshots.saved_bytes,
            restored_tokens=snapshots.restored_tokens,
            restored_bytes=snapshots.restored_bytes,
            evicted_tokens=index.evicted_tokens,
            evicted_bytes=index.evicted_bytes,
        )

    def _lower(self, tier: Tier) -> TierStats:
        book = self._tiers.book
        counts = book.counts[tier]
        prefixes, used = book.held(tier)
        host = tier is Tier.HOST
        return TierStats(
            tier=str(tier),
            snapshots=prefixes,
            used_bytes=used,
            limit_bytes=book.regions.total_bytes if host else book.disk_limit,
            saved_tokens=counts.saved_tokens,
            saved_bytes=counts.saved_bytes,
            restored_tokens=counts.restored_tokens,
            restored_bytes=counts.restored_bytes,
            evicted_tokens=counts.evicted_tokens,
            evicted_bytes=counts.evicted_bytes,
            corrupt_files=counts.corrupt,
            stopped="" if host else self._tiers.writes_stopped,
        )


def _check_room(settings: PrefixCacheConfig, least: int) -> None:
    """Refuse a tier that could never hold anything.

    Args:
        least: bytes of a snapshot of one page, the shortest that is copied.
    """
    if not settings.enabled or not settings.host_bytes:
        return
    tiers = [("host_bytes", settings.host_bytes, least)]
    if settings.disk_path is not None:
        tiers.append(("disk_bytes", settings.disk_bytes, least + HEADER_ALLOWANCE))
    for name, given, needed in tiers:
        if given < needed:
            raise ConfigError(
                f"prefix_cache.{name} is {given}, the shortest prefix takes {needed}; raise it to "
                "some prefixes, or leave the tier out"
            )

"""What operators see of the tiers: series by tier, restore times (contract: A5, M7)."""

from __future__ import annotations

import pytest

from flare_ray.contracts.tiers import Tier, TierFault, TierMove
from flare_ray.metrics import names
from tests.unit.controller.test_prefix_reuse import prompt_of, run
from tests.unit.controller.test_tiers import (
    PAGE_BYTES,
    ROW_BYTES,
    forget_host,
    leave_on_disk,
    others,
    settle,
    stats_of,
)
from tests.unit.controller.test_tiers import make_tiered as make_tiered

COUNTERS = {
    names.SNAPSHOT_SAVED: "saved_tokens",
    names.SNAPSHOT_SAVED_BYTES: "saved_bytes",
    names.SNAPSHOT_RESTORED: "restored_tokens",
    names.SNAPSHOT_RESTORED_BYTES: "restored_bytes",
    names.SNAPSHOT_EVICTED: "evicted_tokens",
    names.SNAPSHOT_EVICTED_BYTES: "evicted_bytes",
}


def value(harness, series, tier):
    samples = harness.recorder.snapshot().samples
    return next(s.value for s in samples if s.name == series.name and s.labels == (tier,))


def test_series_of_every_tier_are_its_own_counts(make_tiered):
    """Traffic that saves to and restores from each tier, and evicts from all but the disk."""
    harness = make_tiered(disk_bytes=200_000, host_bytes=6000)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    assert run(harness, "disk", prompt, max_tokens=3).cached_tokens == 150
    others(harness, 12)
    run(harness, "again", prompt, max_tokens=3)
    settle(harness)
    harness.step(2)
    for tier in map(str, Tier):
        stats = stats_of(harness, tier)
        for series, field in COUNTERS.items():
            assert value(harness, series, tier) == getattr(stats, field), (tier, field)
        assert value(harness, names.SNAPSHOTS_HELD, tier) == stats.snapshots
        assert value(harness, names.SNAPSHOT_BYTES, tier) == stats.used_bytes
        assert stats.saved_tokens > 0, tier
        assert tier == "disk" or stats.evicted_tokens > 0, tier
        assert stats.used_bytes <= stats.limit_bytes
    assert stats_of(harness, "disk").restored_tokens >= 128


def test_restore_is_counted_in_bytes_and_time_where_it_came_from(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("waits", prompt, max_tokens=3)
    harness.step(3, 0.0)
    harness.clock.advance(2.0)
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    harness.step(2)
    assert value(harness, names.SNAPSHOT_RESTORED_BYTES, "disk") == ROW_BYTES + 3 * PAGE_BYTES
    assert value(harness, names.SNAPSHOT_RESTORED, "host") == 0
    assert value(harness, names.SNAPSHOT_RESTORE_SECONDS, "disk") == pytest.approx(2.0, abs=0.5)
    assert value(harness, names.SNAPSHOT_RESTORE_SECONDS, "host") == 0


def test_damaged_file_is_counted_once(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.faults[TierMove.READ] = TierFault.CORRUPT
    for name in ("first", "second"):
        run(harness, f"{name} again", prompt, max_tokens=1)
    forget_host(harness)
    [corrupt] = [
        sample.value
        for sample in harness.recorder.snapshot().samples
        if sample.name == names.SNAPSHOT_CORRUPT.name
    ]
    assert corrupt == 1

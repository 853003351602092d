"""Host and disk tiers as the controller drives them (contract: M7).

The fake ranks keep tokens where real ones keep state, and refuse a move or a restore of other
tokens than those it stands for. Bytes: a row counts 1,000, a page 100.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from flare_ray.actors.wire import encode_order
from flare_ray.contracts.manifest import ByteBudget
from flare_ray.contracts.messages import Finished
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import Tier, TierFault, TierMove, TierOrder
from flare_ray.controller.paging import tiers as tiers_module
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.disk import (
    FORMAT_VERSION,
    MAX_MANIFEST_PAGES,
    DiskManifest,
    PartFile,
    sealed,
)
from flare_ray.controller.paging.tiers import Tiers
from flare_ray.metrics import names
from tests.support.fake_channel import hashed_accepts, make_manifest
from tests.unit.controller.test_prefix_reuse import prompt_of, run

ROW_BYTES, PAGE_BYTES = 1000, 100
ROOM = 200_000


def tiered(*, rows=2, host_bytes=ROOM, **settings):
    """A manifest with a host tier and few rows on the device."""
    manifest = make_manifest(**settings)
    budget = ByteBudget(
        weights_bytes=0,
        page_bytes=PAGE_BYTES * manifest.num_pages,
        state_bytes=0,
        graph_pool_bytes=0,
        scratch_bytes=0,
    )
    return msgspec.structs.replace(
        manifest,
        budget=budget,
        snapshot_rows=rows,
        snapshot_row_bytes=ROW_BYTES,
        host_cache_bytes=host_bytes,
    )


@pytest.fixture
def make_tiered(make_harness, tmp_path, monkeypatch):
    """A harness with a host tier, and with a disk tier where `disk_bytes` is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "config.json").write_text("{}")
    made = []

    def make(*, disk_bytes=0, accepts=None, **settings):
        manifest = tiered(**settings)
        cache = {"host_bytes": manifest.host_cache_bytes}
        if disk_bytes:
            cache |= {"disk_path": str(tmp_path / "cache"), "disk_bytes": disk_bytes}
        harness = make_harness(manifest=manifest, prefix_cache=cache, accepts=accepts)
        made.append(harness)
        return harness

    yield make
    for harness in made:
        harness.controller.check_integrity()
        harness.controller.cache.close()


def others(harness, count, start=0):
    """Requests of other prompts, which push everything out of a device tier of two rows."""
    for number in range(start, start + count):
        run(harness, f"o{number}", prompt_of(70, seed=number + 50), max_tokens=1)


def settle(harness):
    """Step until nothing moves any more."""
    for _ in range(200):
        if not harness.controller.cache.is_moving:
            # Also the round that was queued behind the last end.
            harness.step(2)
            return
        harness.step(1, 0.0)
    raise AssertionError("tiers do not come to rest")


def stats_of(harness, tier):
    return next(t for t in harness.controller.cache.stats().tiers if t.tier == tier)


def moves_of(harness, move):
    return [order for order in harness.channel.tiers.moves if order.move is move]


def forget_host(harness):
    harness.controller.cache.reset(frozenset({Tier.HOST, Tier.DEVICE}), lambda _: None)
    harness.step(2, 0.0)
    settle(harness)


def leave_on_disk(harness, prompt, *, answer=1):
    """Run a request of this prompt; its prefix is then on disk alone."""
    run(harness, "first", prompt, max_tokens=answer)
    settle(harness)
    forget_host(harness)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_evicted_prefix_comes_back_from_the_host(make_tiered, length):
    harness = make_tiered()
    prompt = prompt_of(length)
    run(harness, "first", prompt, max_tokens=3)
    others(harness, 10)
    end = run(harness, "again", prompt, max_tokens=30)
    # less than a page is consumed again rather than waited for
    assert end.cached_tokens == (length if length >= 64 else 0)
    assert harness.tokens("again") == harness.expected(prompt, 30)
    assert stats_of(harness, "host").restored_tokens == end.cached_tokens
    harness.assert_all_free()


@pytest.mark.parametrize("length", [64, 129])
def test_prefix_that_left_the_host_too_comes_back_from_disk(make_tiered, length):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(length)
    leave_on_disk(harness, prompt, answer=3)
    end = run(harness, "again", prompt, max_tokens=30)
    assert end.cached_tokens == length
    assert harness.tokens("again") == harness.expected(prompt, 30)
    assert stats_of(harness, "disk").restored_tokens == length
    assert stats_of(harness, "host").restored_tokens == 0
    # it is in the host tier again
    others(harness, 10)
    assert run(harness, "third", prompt, max_tokens=3).cached_tokens == length
    assert len(moves_of(harness, TierMove.READ)) == 1


def test_rounds_of_others_run_on_while_a_slow_disk_is_read(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(200)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("running", prompt_of(20, 3), max_tokens=400)
    harness.run_rounds(3)
    harness.submit("waits", prompt, max_tokens=5)
    harness.submit("passes", prompt_of(40, 4), max_tokens=10)
    before = harness.controller.stats().rounds
    harness.run_rounds(40)
    assert harness.controller.stats().rounds - before >= 40
    assert isinstance(harness.end("passes"), Finished)
    assert harness.controller.stats().waiting == 1
    assert not harness.tokens("waits")
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    assert harness.end("waits").cached_tokens == 200
    assert harness.tokens("waits") == harness.expected(prompt, 5)


def test_requests_of_one_stored_prefix_share_its_restore(make_tiered):
    harness = make_tiered(rows=8)
    prompt = prompt_of(130)
    run(harness, "first", prompt, max_tokens=1)
    settle(harness)
    harness.controller.cache.reset(frozenset({Tier.DEVICE}), lambda _: None)
    harness.step(2)
    for name in "abc":
        harness.submit(name, (*prompt, 7), max_tokens=4)
    harness.run_until_idle()
    assert [harness.end(name).cached_tokens for name in "abc"] == [130] * 3
    assert len(moves_of(harness, TierMove.LOAD)) == 1


def test_damaged_file_is_reported_once_deleted_and_computed_again(make_tiered, caplog):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    run(harness, "first", prompt, max_tokens=1)
    settle(harness)
    files = set(harness.channel.tiers.files)
    forget_host(harness)
    harness.channel.tiers.faults[TierMove.READ] = TierFault.CORRUPT
    assert run(harness, "again", prompt, max_tokens=9).cached_tokens == 0
    assert harness.tokens("again") == harness.expected(prompt, 9)
    assert stats_of(harness, "disk").corrupt_files == 1
    assert sum("made to fail" in message for message in caplog.messages) == 1
    settle(harness)
    [read] = moves_of(harness, TierMove.READ)
    assert read.path in files and read.path not in harness.channel.tiers.files


def test_full_disk_ends_writing_and_nothing_else(make_tiered, caplog):
    harness = make_tiered(disk_bytes=10_000_000)
    stored = prompt_of(150)
    run(harness, "stored", stored, max_tokens=1)
    settle(harness)
    harness.channel.tiers.faults[TierMove.WRITE] = TierFault.NO_SPACE
    others(harness, 5)
    settle(harness)
    writes = len(moves_of(harness, TierMove.WRITE))
    others(harness, 5, start=5)
    settle(harness)
    assert len(moves_of(harness, TierMove.WRITE)) == writes
    assert "made to fail" in stats_of(harness, "disk").stopped
    assert any("nothing more is written" in message for message in caplog.messages)
    gauge = harness.recorder.gauge(names.DISK_TIER_STOPPED)
    assert gauge.value == 1
    # what was written before is still of use
    forget_host(harness)
    assert run(harness, "again", stored, max_tokens=3).cached_tokens == 150
    harness.controller.cache.reset(frozenset({Tier.DISK}), lambda _: None)
    others(harness, 3, start=20)
    settle(harness)
    assert len(moves_of(harness, TierMove.WRITE)) > writes
    assert stats_of(harness, "disk").stopped == "" and gauge.value == 0


def test_reset_of_all_tiers_leaves_nothing_to_find(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    run(harness, "first", prompt, max_tokens=5)
    harness.step(1)
    told = []
    harness.controller.cache.reset(frozenset(Tier), told.append)
    harness.step(2)
    settle(harness)
    [reset] = told
    assert reset.dropped["device"] >= 1 and reset.in_use == 0
    assert run(harness, "again", prompt, max_tokens=5).cached_tokens == 0
    assert harness.channel.tiers.sealed == harness.channel.tiers.files.keys()


def test_reset_during_a_restore_makes_the_request_compute(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("waits", prompt, max_tokens=5)
    harness.step(3)
    harness.controller.cache.reset(frozenset(Tier), lambda _: None)
    harness.step(2)
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    assert harness.end("waits").cached_tokens == 0
    assert harness.tokens("waits") == harness.expected(prompt, 5)


def test_dynamo_7489_request_cancelled_during_its_restore_leaves_the_prefix_usable(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("gone", prompt, max_tokens=5)
    harness.step(3)
    harness.controller.cancel("gone")
    harness.step(2)
    harness.channel.tiers.held.clear()
    settle(harness)
    assert run(harness, "again", prompt, max_tokens=5).cached_tokens == 150
    assert len(moves_of(harness, TierMove.READ)) == 1


def test_stored_prefix_of_another_salt_is_not_restored(make_tiered):
    harness = make_tiered()
    prompt = prompt_of(150)
    run(harness, "a", prompt, max_tokens=1, cache_salt="tenant a")
    others(harness, 10)
    assert run(harness, "b", prompt, max_tokens=1, cache_salt="tenant b").cached_tokens == 0
    others(harness, 10, start=10)
    assert run(harness, "c", prompt, max_tokens=1, cache_salt="tenant a").cached_tokens == 150


@pytest.mark.parametrize("host_bytes", [1500, 6000])
@pytest.mark.parametrize("rows", [1, 6])
def test_random_traffic_over_all_tiers_leaves_every_text_as_if_cold(
    make_tiered, random_seed, host_bytes, rows
):
    rng = random.Random(random_seed)
    harness = make_tiered(
        rows=rows,
        host_bytes=host_bytes,
        disk_bytes=300_000,
        slots=4,
        context_tokens=512,
        num_pages=33,
        prefill_tokens=96,
        accepts=hashed_accepts(0.8),
    )
    fake = harness.channel.tiers
    roots = [prompt_of(rng.choice([1, 63, 64, 65, 127, 128, 129, 190]), s) for s in range(4)]
    prompts = {}
    for number in range(80):
        root = rng.choice(roots)
        base = root[: rng.randint(1, len(root))] if rng.random() < 0.3 else root
        prompt = (*base, *prompt_of(rng.choice([0, 1, 5, 70]), rng.randint(0, 2)))
        prompts[f"r{number}"] = (prompt, rng.randint(1, 150))
        harness.submit(f"r{number}", prompt, max_tokens=prompts[f"r{number}"][1])
        fake.held = {move for move in TierMove if rng.random() < 0.3}
        if rng.random() < 0.1:
            fake.faults[TierMove.READ] = TierFault.CORRUPT
        if rng.random() < 0.05:
            tiers = frozenset(tier for tier in Tier if rng.random() < 0.5)
            harness.controller.cache.reset(tiers, lambda _: None)
        harness.step(rng.randint(0, 6))
        if rng.random() < 0.15:
            harness.controller.cancel(f"r{number}")
        harness.controller.check_integrity()
    fake.held.clear()
    harness.run_until_idle()
    settle(harness)
    for name, (prompt, budget) in prompts.items():
        if isinstance(harness.end(name), Finished):
            assert harness.tokens(name) == harness.expected(prompt, budget), name
    assert fake.sealed == fake.files.keys()
    harness.assert_all_free()


def test_longest_stored_prefix_has_a_manifest_that_fits_a_message():
    manifest = DiskManifest(
        version=FORMAT_VERSION,
        label="a" * 64,
        tokens=(MAX_MANIFEST_PAGES + 1) * PAGE_TOKENS - 1,
        digests=("d" * 32,) * (MAX_MANIFEST_PAGES + 1),
        tail=(151_935,) * (PAGE_TOKENS - 1),
        parts=(PartFile(1 << 40, "c" * 64),) * 8,
    )
    order = TierOrder(
        ticket=1 << 40,
        move=TierMove.SEAL,
        entry=1 << 40,
        tokens=manifest.tokens,
        path="p" * 1024,
        label=manifest.label,
        manifest=sealed(manifest),
    )
    encode_order(order)


def test_prefix_too_long_for_a_manifest_stays_in_host_memory(make_tiered, monkeypatch):
    monkeypatch.setattr(tiers_module, "MAX_MANIFEST_PAGES", 1)
    harness = make_tiered(disk_bytes=10_000_000)
    run(harness, "short", prompt_of(100), max_tokens=1)
    run(harness, "long", prompt_of(150, seed=1), max_tokens=1)
    settle(harness)
    assert {order.tokens // PAGE_TOKENS for order in moves_of(harness, TierMove.WRITE)} == {1}
    assert 2 in {order.tokens // PAGE_TOKENS for order in moves_of(harness, TierMove.STORE)}


def key_of(harness, prompt):
    return TokenChain(prompt, "").key(len(prompt))


def test_what_can_come_back_is_evicted_before_what_would_be_lost(make_tiered):
    """Page pressure while copies are slow: the snapshots that wait for theirs go last."""
    harness = make_tiered(rows=16, num_pages=11, context_tokens=640)
    index = harness.controller._snapshots.index
    copied, busy, waiting = (prompt_of(length, seed=length) for length in (200, 64, 65))
    run(harness, "copied", copied, max_tokens=1)
    settle(harness)
    harness.channel.tiers.held.add(TierMove.STORE)
    run(harness, "busy", busy, max_tokens=1)
    run(harness, "waiting", waiting, max_tokens=1)
    # worth less than what has been copied: it saves one token beyond its page boundary
    assert index.get(key_of(harness, waiting)).awaits_copy
    run(harness, "pressure", prompt_of(300, seed=9), max_tokens=60)
    assert index.get(key_of(harness, copied)) is None
    assert index.get(key_of(harness, waiting)) is not None
    harness.channel.tiers.held.clear()
    settle(harness)
    harness.controller.cache.reset(frozenset({Tier.DEVICE}), lambda _: None)
    assert run(harness, "again", waiting, max_tokens=5).cached_tokens == 65
    assert run(harness, "first", copied, max_tokens=5).cached_tokens == 200


def test_snapshot_evicted_before_its_copy_begins_costs_tokens_and_nothing_else(make_tiered):
    harness = make_tiered(rows=1)
    harness.channel.tiers.held.add(TierMove.STORE)
    prompt = prompt_of(65)
    run(harness, "kept", prompt_of(70, seed=3), max_tokens=1)
    run(harness, "lost", prompt, max_tokens=1)
    harness.channel.tiers.held.clear()
    settle(harness)
    assert run(harness, "again", prompt, max_tokens=5).cached_tokens in (0, 64)
    assert harness.tokens("again") == harness.expected(prompt, 5)


def test_other_threads_see_a_move_until_its_last_step_is_done(make_tiered, monkeypatch):
    """Who waits for the tiers to rest must not be let go between two steps of one prefix."""
    harness = make_tiered(disk_bytes=10_000_000)
    seen = []
    order = Tiers._order

    def noted(self, *args):
        seen.append(harness.controller.cache.is_moving)
        order(self, *args)

    monkeypatch.setattr(Tiers, "_order", noted)
    run(harness, "first", prompt_of(150), max_tokens=1)
    settle(harness)
    assert seen and all(seen)


def test_disk_read_keeps_no_row_and_no_page_from_others(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000, rows=2)
    prompt = prompt_of(150)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("waits", prompt, max_tokens=5)
    harness.step(3)
    pool = harness.controller._pool
    assert moves_of(harness, TierMove.READ) and not pool.cached_pages
    # both rows are of use to somebody else
    run_beside(harness, "other", prompt_of(130, seed=8))
    assert len(harness.controller._snapshots.index) == 2
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    assert harness.end("waits").cached_tokens == 150


def run_beside(harness, name, prompt, *, max_tokens=1):
    """Run a request to its end while another one waits."""
    harness.submit(name, prompt, max_tokens=max_tokens)
    for _ in range(200):
        harness.step()
        if any(isinstance(item, Finished) for item in harness.output.items(name)):
            return
    raise AssertionError(f"{name} does not end")


def test_prefix_read_while_the_device_is_full_comes_up_once_there_is_room(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000, num_pages=11, context_tokens=640)
    prompt, long = prompt_of(150), prompt_of(560, seed=5)
    leave_on_disk(harness, prompt)
    harness.channel.tiers.held.add(TierMove.READ)
    harness.submit("waits", prompt, max_tokens=5)
    harness.step(3)
    harness.submit("fills", long, max_tokens=60)
    harness.run_rounds(8)
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    assert harness.tokens("fills") == harness.expected(long, 60)
    assert harness.end("waits").cached_tokens == 150
    assert harness.tokens("waits") == harness.expected(prompt, 5)
    assert len(moves_of(harness, TierMove.READ)) == 1


def test_lane_that_is_short_of_a_staged_restores_pages_sits_out_and_preempts_nobody(make_tiered):
    harness = make_tiered(rows=4, num_pages=11, slots=3, context_tokens=640)
    prompt = prompt_of(150)
    run(harness, "first", prompt, max_tokens=1)
    settle(harness)
    harness.controller.cache.reset(frozenset({Tier.DEVICE}), lambda _: None)
    harness.step(2)
    harness.channel.tiers.held.add(TierMove.LOAD)
    harness.submit("waits", prompt, max_tokens=5)
    harness.step(2)
    assert harness.controller._pool.cached_pages == 3
    growing = {name: prompt_of(60, seed) for seed, name in enumerate(("a", "b"))}
    for name, own in growing.items():
        harness.submit(name, own, max_tokens=250)
    harness.step(400)
    admission = harness.controller._admission
    assert admission.short_pages and not sum(admission.preempted.values())
    harness.channel.tiers.held.clear()
    harness.run_until_idle()
    for name, own in growing.items():
        assert harness.tokens(name) == harness.expected(own, 250)
    assert harness.tokens("waits") == harness.expected(prompt, 5)


def test_drain_ends_once_what_was_left_is_on_disk(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    harness.submit("last", prompt_of(150), max_tokens=3)
    harness.controller.stop(drain=True)
    harness.controller.run()
    assert isinstance(harness.end("last"), Finished)
    moves = harness.channel.tiers
    assert len(moves.sealed) == len(moves_of(harness, TierMove.STORE)) > 0
    assert not harness.controller.cache.is_moving


def test_stop_without_drain_waits_for_no_disk(make_tiered):
    harness = make_tiered(disk_bytes=10_000_000)
    harness.channel.tiers.held.add(TierMove.WRITE)
    run(harness, "last", prompt_of(150), max_tokens=3)
    harness.step(3)
    assert harness.controller.cache.is_moving
    harness.controller.stop(drain=False)
    harness.controller.run()

"""`EngineMachine` with host and disk tiers below the device (contract: M7).

Moves run as late as a rank could run them: an order's saves at once, its copy, file or deletion
only when a rule lets it, after whatever rounds came between. What the controller must hold
meanwhile and does not is then overwritten, and every byte of host memory that holds nothing is
poisoned after each move. Reports arrive with the next step.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from flare_ray.actors.wire import encode_order
from flare_ray.config import PrefixCacheConfig
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import Tier, TierOrder, TierOutcome, TierReport
from flare_ray.controller.paging.tiers import HEADER_ALLOWANCE
from flare_ray.device.executor import RankExecutor
from flare_ray.device.state.staging import LINE_OF, LINES, Staging
from tests.support.engine_machine import CONTEXT_TOKENS, DirectChannel, EngineMachine
from tests.support.tier_memory import poison_free

MOVE_LIMIT_S = 20.0
REST_STEPS = 3000
LONGEST = 160
"""Tokens of a prompt that comes back."""
Report = Callable[[TierReport], None]


@dataclass
class HeldMoves:
    """Stands before a rank's `Staging`: what begins waits for `release`.

    Attributes:
        lines: moves of each thread, in their order.
    """

    staging: Staging
    lines: tuple[deque[tuple[TierOrder, Report]], ...] = field(
        default_factory=lambda: tuple(deque() for _ in LINES)
    )

    def begin(self, order: TierOrder, report: Report) -> None:
        """As `Staging.begin`, but nothing happens yet."""
        self.lines[LINE_OF[order.move]].append((order, report))

    def release(self, line: int) -> bool:
        """Run the oldest move of a line to its end; whether there was one."""
        if not self.lines[line]:
            return False
        order, report = self.lines[line].popleft()
        done: queue.SimpleQueue[TierReport] = queue.SimpleQueue()
        self.staging.begin(order, done.put)
        report(done.get(timeout=MOVE_LIMIT_S))
        poison_free(self.staging.arena)
        return True

    def stop(self) -> None:
        """As `Staging.stop`."""
        self.staging.stop()


class TierChannel(DirectChannel):
    """A channel to one rank whose moves are held.

    Attributes:
        held: the moves.
    """

    def __init__(self, rank: RankExecutor, queue_depth: int) -> None:
        super().__init__(rank, queue_depth)
        assert rank.staging is not None
        self.held = HeldMoves(rank.staging)
        rank.staging = self.held  # type: ignore[assignment]
        self.reports: list[TierReport] = []

    def order(self, order: TierOrder) -> None:
        encode_order(order)
        self.rank.order(order, lambda report: self.reports.append(report))

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        reports, self.reports = self.reports, []
        return tuple(
            TierOutcome(
                report.ticket,
                report.fault,
                report.num_bytes,
                report.elapsed_ns,
                (report.checksum,),
                report.text,
            )
            for report in reports
        )


class TierMachine(EngineMachine):
    """Random use of one engine with tiers. A subclass names its `engine`."""

    rows = (2, 3, 12)
    regions = (2, 4, 12)
    """Prefixes of four pages that the host has room for; the disk holds as many again."""

    @initialize(
        depth=st.sampled_from((1, 2)),
        pool=st.integers(0, 2),
        rows=st.integers(0, 2),
        seed=st.integers(0, 2**16),
        host=st.integers(0, 2),
        disk=st.integers(0, 2),
    )
    def start(
        self, depth: int, pool: int, rows: int, seed: int, host: int = 2, disk: int = 2
    ) -> None:
        manifest = self.engine.manifest
        self.page_bytes = manifest.budget.page_bytes // manifest.num_pages
        prefix = manifest.snapshot_row_bytes + 4 * self.page_bytes
        largest = manifest.snapshot_row_bytes + CONTEXT_TOKENS // PAGE_TOKENS * self.page_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="flare-tiers-"))
        self.cache = PrefixCacheConfig(
            host_bytes=max(self.regions[host] * prefix, largest),
            disk_path=str(self.folder),
            disk_bytes=self.regions[disk] * prefix + HEADER_ALLOWANCE,
        )
        super().start(depth, pool, rows, seed)

    def open(self, manifest, depth: int) -> None:
        budget = msgspec.structs.replace(
            manifest.budget, page_bytes=self.page_bytes * manifest.num_pages
        )
        manifest = msgspec.structs.replace(
            manifest, host_cache_bytes=self.cache.host_bytes, budget=budget
        )
        self.rank, self.heard = self.engine.rank(manifest)
        self.controller, self.channel = self.engine.controller(
            self.rank, depth, channel=TierChannel, cache=self.cache
        )
        assert isinstance(self.channel, TierChannel)

    # What time does.

    @rule(count=st.integers(1, 4), line=st.integers(0, len(LINES) - 1))
    def move(self, count: int, line: int) -> None:
        """Some moves of one thread come to their end."""
        for _ in range(count):
            self.channel.held.release(line)

    @rule(steps=st.sampled_from((1, 5, 20)))
    def run_beside_moves(self, steps: int) -> None:
        """Rounds while every move ends soon, so that prefixes get as far as the disk."""
        for _ in range(steps):
            self.controller.step(0.0)
            for line in range(len(LINES)):
                self.channel.held.release(line)

    # What administrators and page pressure do.

    @rule(tiers=st.sampled_from(("device", "device", "device host", "host", "disk")))
    def forget(self, tiers: str) -> None:
        """So the next request of that prefix comes from a lower tier, or from none."""
        names = frozenset(Tier(name) for name in tiers.split())
        self.controller.cache.reset(names, lambda _: None)

    @rule(count=st.integers(2, 12))
    def evict_many(self, count: int) -> None:
        for _ in range(count):
            self.controller._snapshots.index.evict()

    @precondition(lambda self: self.works)
    @rule(
        which=st.integers(0, 63),
        tiers=st.sampled_from(("device", "device host")),
        tail=st.integers(0, 2),
        budget=st.sampled_from((1, 20, 70)),
        steps=st.sampled_from((20, 60)),
        spoilt=st.sampled_from((False, False, False, True)),
    )
    def come_back(
        self, which: int, tiers: str, tail: int, budget: int, steps: int, spoilt: bool
    ) -> None:
        """An earlier prompt once more, longer perhaps, when the device has forgotten it. Its
        restore is held until another rule lets it go."""
        prompts = [work[0] for work in self.works.values()]
        prompts = [prompt for prompt in prompts if len(prompt) >= PAGE_TOKENS] or prompts
        prompt = prompts[which % len(prompts)]
        self.run_beside_moves(steps)
        for file in self.folder.rglob("*.part") if spoilt else ():
            flip(file, 0.5)
        self.forget(tiers)
        self.controller.step(0.0)
        self.send(prompt[:LONGEST] + tuple(range(9, 9 + tail)), budget)
        self.controller.step(0.0)

    # What disks do.

    @precondition(lambda self: any(self.folder.rglob("*.part")))
    @rule(which=st.integers(0, 63), place=st.floats(0.0, 1.0, exclude_max=True))
    def spoil(self, which: int, place: float) -> None:
        """A bit of a file is another one."""
        files = sorted(self.folder.rglob("*.part"))
        flip(files[which % len(files)], place)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            if hasattr(self, "controller"):
                self.come_to_rest()
            super().teardown()
        finally:
            if hasattr(self, "controller"):
                self.rank.close()
                self.controller.cache.close()
            shutil.rmtree(self.folder)

    def come_to_rest(self) -> None:
        """Rounds and moves until there are none."""
        for _ in range(REST_STEPS):
            stats = self.controller.stats()
            if stats.fatal or not (stats.pending_work or self.controller.cache.is_moving):
                return
            self.run_beside_moves(1)
        raise AssertionError("requests and moves do not end")

    def restored(self, tier: Tier) -> int:
        """Tokens that came back from a tier."""
        tiers = self.controller.cache.stats().tiers
        return next(each.restored_tokens for each in tiers if each.tier == str(tier))


def flip(file: Path, place: float) -> None:
    """Make a bit of a file another one; `place` in 0..1 of its length."""
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 4
    file.write_bytes(data)

"""A process that writes snapshots to disk until it is killed, and the look at what it left.

The parent forks it from an interpreter that has everything imported and no thread yet, so that two
hundred kills take seconds. Two ranks write; content follows from the snapshot's number, which its
tail tokens carry.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import time
from pathlib import Path

import numpy as np

from flare_ray.contracts.tiers import TierFault, TierMove, TierOrder, TierReport
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.disk import (
    FORMAT_VERSION,
    DiskDirectory,
    DiskManifest,
    PartFile,
    StoredPrefix,
    sealed,
)
from flare_ray.device.state.layout import StateLimits
from flare_ray.device.state.snapshot_host import SnapshotArena
from flare_ray.device.state.staging import Staging
from flare_ray.device.state.store import StateStore
from flare_ray.recipes.declaration import StateGroup, StateSpec

RANKS = 2
LABEL = "the engine under test"
KEPT = 6
"""Snapshots that a writer keeps; older ones are deleted while it writes new ones."""

SPEC = StateSpec(
    groups=(
        StateGroup("pages", "page", (64, 40), "target"),
        StateGroup("matrix", "column", (32, 64), "target", dtype="float32"),
        StateGroup("open", "ring", (3,), "drafter", entries=12),
        StateGroup("count", "row", (5,), "target", dtype="int64"),
    ),
    feedback_width=16,
    sampling_width=16,
)
LIMITS = StateLimits(
    slots=1,
    num_pages=8,
    context_tokens=256,
    dtype="float32",
    device="cpu",
    vocab_size=16,
    speculation=True,
    snapshot_rows=1,
)
ARENA_BYTES = 1 << 20


def make_arena() -> SnapshotArena:
    """The host tier of one rank."""
    return SnapshotArena(StateStore(SPEC, LIMITS), SPEC, LIMITS, ARENA_BYTES)


def chain_of(number: int) -> TokenChain:
    """Tokens of snapshot `number`: one or two pages and a tail that spells the number."""
    pages = 1 + number % 2
    digits = [number // 10**place % 10 for place in range(6)]
    return TokenChain([3] * 64 * pages + digits, "")


def content_of(arena: SnapshotArena, number: int, rank: int) -> np.ndarray:
    """Bytes of rank `rank`'s part."""
    size = arena.layout.num_bytes(len(chain_of(number).tokens))
    return np.random.default_rng([number, rank]).integers(0, 256, size, dtype=np.uint8)


class Writer:
    """Writes and deletes snapshots through the real threads of two ranks."""

    def __init__(self, directory: DiskDirectory, arenas: list[SnapshotArena]) -> None:
        self._directory = directory
        self._arenas = arenas
        self._ranks = [
            Staging(arena, rank, "cpu", lambda order: None) for rank, arena in enumerate(arenas)
        ]
        self._reports: queue.SimpleQueue[TierReport] = queue.SimpleQueue()
        self._ticket = 0

    def run(self, first: int) -> None:
        """For ever."""
        kept: list[tuple[int, str]] = []
        number = first
        while True:
            stem = self._directory.new_stem()
            self.write(number, stem)
            kept.append((number, stem))
            if len(kept) > KEPT:
                old, stem = kept.pop(0)
                self._order(TierMove.DELETE, old, path=stem)
            number += 1

    def write(self, number: int, stem: str) -> None:
        """One snapshot, as `Tiers` has it written."""
        chain = chain_of(number)
        for rank, arena in enumerate(self._arenas):
            data = content_of(arena, number, rank)
            order = TierOrder(0, TierMove.STORE, number, len(chain.tokens))
            arena.memory.numpy()[: len(data)] = data
            arena._fill(order, arena._claim(order))
        reports = self._order(TierMove.WRITE, number, path=stem, label=LABEL)
        digests = tuple(chain.digest(n).hex() for n in range(len(chain.tokens) // 64 + 1))
        manifest = DiskManifest(
            version=FORMAT_VERSION,
            label=LABEL,
            tokens=len(chain.tokens),
            digests=digests,
            tail=chain.key(len(chain.tokens))[1],
            parts=tuple(PartFile(report.num_bytes, report.checksum) for report in reports),
        )
        self._order(TierMove.SEAL, number, path=stem, manifest=sealed(manifest))

    def _order(self, move: TierMove, number: int, **fields: object) -> list[TierReport]:
        self._ticket += 1
        tokens = len(chain_of(number).tokens)
        for rank in self._ranks:
            rank.begin(TierOrder(self._ticket, move, number, tokens, **fields), self._reports.put)
        reports = [self._reports.get(timeout=30) for _ in self._ranks]
        assert all(report.fault is TierFault.NONE for report in reports), reports
        return sorted(reports, key=lambda report: report.rank)


def write_until_killed(path: Path, first: int, lives_s: float, *, has_written: bool) -> None:
    """Fork a writer, kill it after `lives_s` of writing, wait for its end.

    Args:
        has_written: one snapshot is whole before its time begins to run.
    """
    ready, started = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            directory = DiskDirectory.open(str(path), LABEL, RANKS)
            writer = Writer(directory, [make_arena() for _ in range(RANKS)])
            if has_written:
                writer.write(first - 1, directory.new_stem())
            os.write(started, b"+")
            writer.run(first)
        finally:
            os._exit(1)
    os.close(started)
    assert os.read(ready, 1) == b"+"
    os.close(ready)
    time.sleep(lives_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def check_all(path: Path, arenas: list[SnapshotArena]) -> list[StoredPrefix]:
    """Open the directory as the next engine would; every snapshot that it finds must be exact."""
    directory = DiskDirectory.open(str(path), LABEL, RANKS)
    try:
        assert not directory.rejected, "a killed writer left a manifest that is not usable"
        for stored in directory.found:
            _check(stored, arenas)
        left = {file.name for file in directory.folder.iterdir()} - {"lock"}
        assert len(left) == (RANKS + 1) * len(directory.found), left
        return directory.found
    finally:
        directory.close()


def _check(stored: StoredPrefix, arenas: list[SnapshotArena]) -> None:
    number = sum(digit * 10**place for place, digit in enumerate(stored.trace.tail))
    assert stored.trace.digests[-1] == chain_of(number).digest(1 + number % 2)
    for rank, arena in enumerate(arenas):
        order = TierOrder(
            1, TierMove.READ, 1, stored.tokens, label=LABEL, checksums=stored.checksums
        )
        size = arena.read(order, Path(f"{stored.stem}.r{rank}.part"), stored.checksums[rank])
        expected = content_of(arena, number, rank)
        assert np.array_equal(arena.memory.numpy()[:size], expected), f"snapshot {number} differs"


def kill_repeatedly(path: Path, kills: int, seed: int) -> int:
    """Kill writers `kills` times in one directory; snapshots found over all looks."""
    rng = random.Random(seed)
    arenas = [make_arena() for _ in range(RANKS)]
    found = 0
    for kill in range(kills):
        first, lives_s = 1000 * kill % 900_000 + 1, rng.uniform(0.0, 0.05)
        write_until_killed(path, first, lives_s, has_written=kill % 2 == 0)
        found += len(check_all(path, arenas))
    return found

"""Memory of a process tree as the kernel accounts it: proportional set sizes, by process.

Pages that several processes share count once over all of them (``Pss`` in smaps_rollup), so the
sum is what the tree really occupies. The part that no file backs is kept beside it: it alone can
leak, and it does not change when a program elsewhere maps, or lets go of, the same libraries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")
_RAY_PREFIX = "ray::"


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, or of several with one name.

    Attributes:
        pss_bytes: proportional set size.
        allocated_bytes: its part without a file: heap, stacks, shared memory.
    """

    pss_bytes: int
    allocated_bytes: int

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.pss_bytes + other.pss_bytes, self.allocated_bytes + other.allocated_bytes
        )


NOTHING = Memory(0, 0)


def read_memory(pid: int, proc: Path = PROC) -> Memory | None:
    """Memory of one process; None if it has gone."""
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return None
    sizes = {
        words[0]: int(words[1]) * 1024
        for line in text.splitlines()
        if len(words := line.split()) == 3 and words[2] == "kB"
    }
    if "Pss:" not in sizes:
        return None  # a process about to be collected has no mappings
    return Memory(sizes["Pss:"], sizes["Pss_Anon:"] + sizes["Pss_Shmem:"])


def process_label(command: list[str]) -> str:
    """Short name of a process that is the same in every run: no ids, no paths.

    Ray's workers carry a title such as ``ray::ServeReplica:app:Engine``; idle ones ``ray::IDLE``.
    """
    words = " ".join(command).split()
    if not words:
        return "kernel"
    if words[0].startswith(_RAY_PREFIX):
        return words[0].removeprefix(_RAY_PREFIX).split(".")[0]
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, program)
        if word.endswith(".py"):
            return Path(word).stem
    return program


def tree_of(root_pid: int) -> list[psutil.Process]:
    """The process and everything below it; empty once it has gone."""
    try:
        root = psutil.Process(root_pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_memory(root_pid: int) -> dict[str, Memory]:
    """Memory by process label over the whole tree."""
    found: dict[str, Memory] = {}
    for process in tree_of(root_pid):
        try:
            command = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        memory = read_memory(process.pid)
        if memory is not None:
            label = process_label(command)
            found[label] = found.get(label, NOTHING) + memory
    return found


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading.

    Attributes:
        time_s: monotonic clock.
        by_process: see `tree_memory`.
    """

    time_s: float
    by_process: Mapping[str, Memory]

    @property
    def total(self) -> Memory:
        """Sum over the tree."""
        return sum(self.by_process.values(), NOTHING)


class MemorySampler:
    """A thread that reads the tree's memory at a fixed period; use as a context manager.

    Attributes:
        samples: readings so far.
    """

    def __init__(
        self,
        root_pid: int,
        *,
        period_s: float,
        read: Callable[[int], dict[str, Memory]] = tree_memory,
    ) -> None:
        self.samples: list[MemorySample] = []
        self._root_pid = root_pid
        self._period_s = period_s
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    @property
    def peak(self) -> MemorySample:
        """The largest reading.

        Raises:
            ValueError: nothing was read.
        """
        return max(self.samples, key=lambda sample: sample.total.pss_bytes)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            found = self._read(self._root_pid)
            if found:
                self.samples.append(MemorySample(time.monotonic(), found))
            if self._stop.wait(self._period_s):
                return


def slope_per_s(times_s: list[float], values: list[float]) -> float:
    """Least-squares slope of values over time, in the values' unit a second.

    Raises:
        ValueError: fewer than two distinct times.
    """
    count = len(times_s)
    mean_time = sum(times_s) / count if count else 0.0
    spread = sum((time_s - mean_time) ** 2 for time_s in times_s)
    if spread == 0:
        raise ValueError(f"a slope needs readings at two times, got {count} reading(s)")
    mean_value = sum(values) / count
    pairs = zip(times_s, values, strict=True)
    return sum((t - mean_time) * (v - mean_value) for t, v in pairs) / spread

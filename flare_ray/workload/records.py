"""What a run writes down: one line an observation, failures included, and one a finished block.

The journal is appended to and never rewritten. A block that was interrupted has observations and no
end; they stay in the file, the block is run again under the next attempt, and reports use ended
attempts only (contract: B2, B3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.workload.items import Answer

JOURNAL, HEADER = "observations.jsonl", "run.json"
WARM = -1
"""Repeat of warm-up blocks, which are kept apart."""


class BlockKey(msgspec.Struct, frozen=True, kw_only=True):
    """A block: the same sessions, run by every arm in turn."""

    arm: str
    category: str
    repeat: int
    chunk: int


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag="observation"):
    """One request.

    Attributes:
        intended_s / sent_s / ended_s: seconds after the block's start; latencies count from
            `intended_s`, which an open loop fixes before the server has answered anything.
        chunk_ms: deliveries with output, after `intended_s`.
        answer: what came back; right / reason: verdict of the item's check.
        error: why it failed; "" = it did not.
        offered ... rounds: -1 = not told.
    """

    block: BlockKey
    attempt: int
    item_id: str
    session: str
    turn: int
    intended_s: float
    sent_s: float
    ended_s: float
    chunk_ms: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    answer: Answer = Answer()
    right: bool | None = None
    reason: str = ""
    error: str = ""
    offered: int = -1
    accepted: int = -1
    copied: int = -1
    copied_accepted: int = -1
    rounds: int = -1
    cpu_s: float = -1.0

    @property
    def first_s(self) -> float:
        """Time to the first output; to the end where nothing was visible."""
        return self.chunk_ms[0] / 1e3 if self.chunk_ms else self.total_s

    @property
    def total_s(self) -> float:
        """End to end."""
        return self.ended_s - self.intended_s

    @property
    def decode_s(self) -> float:
        """First output to the last."""
        return (self.chunk_ms[-1] - self.chunk_ms[0]) / 1e3 if self.chunk_ms else 0.0


class BlockEnd(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """A block has run whole.

    Attributes:
        wall_s: first request to last end.
        cpu_s: CPU time of the process, where the arm runs in it; -1 otherwise.
        counters: growth of the engine's counters over the block, by series and labels; empty where
            the server has none.
    """

    block: BlockKey
    attempt: int
    wall_s: float
    cpu_s: float = -1.0
    counters: dict[str, float] = {}


class ArmStart(msgspec.Struct, frozen=True, kw_only=True, tag="arm"):
    """An arm was started, or refused to: then `refused` says why and it has no blocks."""

    arm: str
    described: str
    refused: str = ""


Record = Observation | BlockEnd | ArmStart


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, fixed at the first start; a resumed run must say the same.

    Attributes:
        workload / digest: name of the items and SHA-256 of their bytes.
        arms: in the order of the first pass.
        settings: everything that shapes the requests.
        environment: machine, versions, commit, command; of the first start.
    """

    workload: str
    digest: str
    arms: tuple[str, ...]
    settings: dict[str, Any]
    environment: dict[str, str]


class Journal:
    """The growing record of one run; use as a context manager.

    Args:
        folder: of the run; made if it is missing.
        header: what is about to run.
    Raises:
        ConfigError: the folder holds another run.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / JOURNAL
        _agree(folder / HEADER, header)
        self.records = read_journal(self._path) if self._path.exists() else []
        _drop_torn_line(self._path)
        self._file = self._path.open("ab")

    def write(self, record: Record) -> None:
        """Append and hand it to the system at once: a killed process loses nothing written."""
        self.records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def ended(self) -> set[BlockKey]:
        """Blocks that need not run again."""
        return {record.block for record in self.records if isinstance(record, BlockEnd)}

    def next_attempt(self, block: BlockKey) -> int:
        """Number of the coming try of a block."""
        tried = [r.attempt for r in self.records if isinstance(r, Observation) and r.block == block]
        return max(tried, default=-1) + 1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _agree(path: Path, header: Header) -> None:
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n")
        partial.replace(path)
        return
    known = msgspec.structs.replace(read_header(path.parent), environment={})
    wanted = msgspec.structs.replace(header, environment={})
    # Through JSON: a tuple of the settings is a list in the file.
    if msgspec.json.encode(known) != msgspec.json.encode(wanted):
        raise ConfigError(
            f"{path.parent} holds another run (other items, arms or settings): name another folder"
        )


def _drop_torn_line(path: Path) -> None:
    """Cut what a kill left of a line, so that the next one starts on its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def read_header(folder: Path) -> Header:
    """Header of a run.

    Raises:
        ConfigError: the folder holds none.
    """
    path = folder / HEADER
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run ({HEADER} is missing)")
    return msgspec.json.decode(path.read_bytes(), type=Header)


def read_journal(path: Path) -> list[Record]:
    """Every whole record of a journal; a torn last line is what a kill leaves.

    Raises:
        ConfigError: another line is broken.
    """
    return list(_records(path))


def _records(path: Path) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line or number == len(lines):
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: no record: {error}") from error

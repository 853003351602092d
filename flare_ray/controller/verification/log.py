"""The decision log: everything a policy was asked and told, and what it answered, as JSON lines.

Equal inputs give equal decisions, so a log replays: `replay` plays it into a fresh policy and
compares every choice. `flare-ray policy explain` shows from it why a width was chosen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from flare_ray.contracts.record import LaneRecord
from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification.adaptive import AdaptivePolicy, Objective
from flare_ray.controller.verification.fixed import FixedPolicy
from flare_ray.controller.verification.policy import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    VerificationPolicy,
)
from flare_ray.errors import ConfigError

FLUSH_ENTRIES = 64
LOG_VERSION = 1


class Opened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """First line: which policy it is. `fixed_width` 0 = adaptive; `inter_token_ns` belongs to the
    objective "slo"."""

    version: int = LOG_VERSION
    fixed_width: int = 0
    objective: Objective = "throughput"
    inter_token_ns: float = 0.0
    measured: tuple[tuple[GraphShape, int], ...] = ()


class Chosen(msgspec.Struct, frozen=True, tag="chosen"):
    """A choice, and the catalog it was made from."""

    cohort: Cohort
    catalog: tuple[GraphShape, ...]
    decision: Decision


class Fate(msgspec.Struct, frozen=True, array_like=True):
    """What one lane's record told."""

    uid: int
    status: int
    offered: int
    accepted: int
    emitted: int


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """A completed round."""

    shape: GraphShape
    lanes: tuple[Fate, ...]
    sources: tuple[tuple[int, ...], ...]
    confidence: tuple[tuple[float, ...], ...]
    cost_ns: int
    copies_alone: bool = False
    is_usual: bool = True


class Forgot(msgspec.Struct, frozen=True, tag="forgot"):
    """A request has ended."""

    uid: int


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """A copy that was not offered, held against the text."""

    uid: int
    source: int
    passed: int
    failed: bool


Entry: TypeAlias = Opened | Chosen | Observed | Forgot | Compared
_DECODER: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(
    Opened | Chosen | Observed | Forgot | Compared
)


class LoggedPolicy:
    """A policy whose every exchange is written down.

    Args:
        policy: the one that decides.
        path: file that is written anew.
        opened: how to make the same policy again.
    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, policy: VerificationPolicy, path: Path, opened: Opened) -> None:
        self._policy = policy
        self._encoder = msgspec.json.Encoder()
        self._written = 0
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"speculation.decision_log: {path} is not writable: {error}"
            ) from None
        self._close = weakref.finalize(self, self._file.close)
        self._write(opened)

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """As the policy itself."""
        shape = self._policy.choose(cohort, catalog)
        self._write(Chosen(cohort, tuple(catalog), self._policy.decision()))
        return shape

    def decision(self) -> Decision:
        """As the policy itself."""
        return self._policy.decision()

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """As the policy itself."""
        fates = tuple(
            Fate(lane.uid, lane.status, lane.offered, lane.accepted, lane.emitted)
            for lane in record.lanes
        )
        told = Observed(
            record.shape,
            fates,
            record.sources,
            record.confidence,
            cost_ns,
            record.copies_alone,
            record.is_usual,
        )
        self._write(told)
        self._policy.observe(record, cost_ns)

    def expected_rate(self, lane: CohortLane) -> float:
        """As the policy itself; not written down, since it changes nothing."""
        return self._policy.expected_rate(lane)

    def compared(self, uid: int, source: int, *, passed: int, failed: bool) -> None:
        """As the policy itself."""
        self._write(Compared(uid, source, passed, failed))
        self._policy.compared(uid, source, passed=passed, failed=failed)

    def forget(self, uid: int) -> None:
        """As the policy itself."""
        self._write(Forgot(uid))
        self._policy.forget(uid)

    def close(self) -> None:
        """Write what is left; idempotent."""
        self._close()

    def _write(self, entry: Entry) -> None:
        self._file.write(self._encoder.encode(entry) + b"\n")
        self._written += 1
        if self._written % FLUSH_ENTRIES == 0:
            self._file.flush()


def read_log(path: Path) -> Iterator[Entry]:
    """The entries of a log; a last line cut by a crash is left out.

    Raises:
        ConfigError: naming the line that is no entry, or a log of another version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a file that decision_log wrote"
        ) from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}, line {number} is no entry of a decision log: {error}"
            ) from None
        if number == 1 and (not isinstance(entry, Opened) or entry.version != LOG_VERSION):
            raise ConfigError(f"{path} is no decision log of version {LOG_VERSION}")
        yield entry


def policy_of(opened: Opened) -> VerificationPolicy:
    """A fresh policy with the settings of a log's first line."""
    if opened.fixed_width:
        return FixedPolicy(opened.fixed_width)
    return AdaptivePolicy(
        dict(opened.measured),
        objective=opened.objective,
        inter_token_ns=opened.inter_token_ns,
    )


def replay(path: Path) -> tuple[int, int]:
    """Play a log into a fresh policy.

    Returns:
        Choices made, and how many of them differ from the log's.
    Raises:
        ConfigError: as `read_log`.
    """
    entries = read_log(path)
    opened = next(entries, None)
    if not isinstance(opened, Opened):
        raise ConfigError(f"{path} is empty")
    policy = policy_of(opened)
    choices = different = 0
    for entry in entries:
        if isinstance(entry, Chosen):
            policy.choose(entry.cohort, entry.catalog)
            choices += 1
            different += policy.decision() != entry.decision
        elif isinstance(entry, Observed):
            record = CompletedRound(
                entry.shape,
                _records(entry.lanes),
                entry.sources,
                entry.confidence,
                entry.copies_alone,
                entry.is_usual,
            )
            policy.observe(record, entry.cost_ns)
        elif isinstance(entry, Compared):
            policy.compared(entry.uid, entry.source, passed=entry.passed, failed=entry.failed)
        elif isinstance(entry, Forgot):
            policy.forget(entry.uid)
    return choices, different


def _records(fates: Sequence[Fate]) -> tuple[LaneRecord, ...]:
    """Records that hold what a policy reads of one; the rest is zero."""
    return tuple(
        LaneRecord(
            fate.uid,
            0,
            0,
            fate.status,
            0,
            0,
            0,
            fate.offered,
            fate.offered,
            fate.accepted,
            fate.emitted,
            0,
            0,
            0,
            0,
            0,
            (),
        )
        for fate in fates
    )

"""Moves of prefix snapshots between device, host memory and disk (contract: M7; channel (c)).

An order travels on a rank's channel among the plans and takes effect in that order: whatever was
submitted before it has run when its move begins, and whatever it may disturb is claimed by the
controller until the rank has reported. The move itself runs on a thread of its own beside the
rounds. Every order gets one report from every rank.

    device row and pages  --STORE-->  host region  --WRITE-->  part file  (SEAL: manifest, last)
                          <--LOAD---               <--READ---             (DELETE: manifest, first)
"""

from __future__ import annotations

import enum

import msgspec

from flare_ray.contracts.plan import SnapshotSave

MAX_OPEN_ORDERS = 8
"""Orders without a report from every rank; what they hold beside two plans fits the channel."""


MANIFEST_ENDING = ".json"
UNFINISHED_ENDING = ".new"
"""Follows the ending of a file that is being written."""


def part_path(stem: str, rank: int) -> str:
    """Path of one rank's file of a snapshot; `stem` is `TierOrder.path`."""
    return f"{stem}.r{rank}.part"


def manifest_path(stem: str) -> str:
    """Path of a snapshot's manifest."""
    return stem + MANIFEST_ENDING


class Tier(enum.StrEnum):
    """Where a snapshot is kept; also the label of its metrics."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class TierMove(enum.IntEnum):
    """What an order moves."""

    STORE = 0
    """Row and pages into a host region."""
    LOAD = 1
    """A host region into a row and pages."""
    WRITE = 2
    """A host region into this rank's part file."""
    READ = 3
    """This rank's part file into a host region, checked."""
    SEAL = 4
    """Rank 0 writes the manifest; the snapshot exists from then on."""
    DELETE = 5
    """The manifest is removed by whichever rank comes first, every part by its rank."""


class TierFault(enum.IntEnum):
    """Why a move did not happen."""

    NONE = 0
    CORRUPT = 1
    """A file is missing, truncated, foreign or damaged."""
    NO_SPACE = 2
    """The file system is full, or a quota is spent."""
    FAILED = 3
    """Anything else that the operating system refused."""


class TierOrder(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One move, on every rank.

    Attributes:
        ticket: rises by one per order of this engine.
        entry: id of the snapshot whose content is meant; a host region that holds another one is
            never read.
        offset: first byte of the host region.
        tokens: tokens of the snapshot; with them every rank knows the region's size.
        speculation: the snapshot holds drafter history.
        row / pages: STORE, LOAD: snapshot row, and page ids of all its tokens.
        saves: STORE, LOAD: saves that no plan has carried yet; executed first, as a plan's are.
        path: WRITE, READ, SEAL, DELETE: path of the snapshot's files without their endings.
        label: WRITE, READ: identity of the engine that may use the file; part of its header.
        checksums: READ: of each rank's whole file.
        manifest: SEAL: content of the manifest.
    """

    ticket: int
    move: TierMove
    entry: int
    tokens: int
    offset: int = 0
    speculation: bool = False
    row: int = -1
    pages: tuple[int, ...] = ()
    saves: tuple[SnapshotSave, ...] = ()
    path: str = ""
    label: str = ""
    checksums: tuple[str, ...] = ()
    manifest: bytes = b""


class TierReport(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """How one rank's part of an order went.

    Attributes:
        num_bytes: bytes moved.
        elapsed_ns: time of the move itself, waiting apart.
        checksum: WRITE: of the file.
        text: what was wrong, where `fault` says that something was.
    """

    ticket: int
    rank: int
    fault: TierFault = TierFault.NONE
    num_bytes: int = 0
    elapsed_ns: int = 0
    checksum: str = ""
    text: str = ""


class TierOutcome(msgspec.Struct, frozen=True):
    """An order that all ranks have reported: faults are the worst one's, times the slowest's."""

    ticket: int
    fault: TierFault
    num_bytes: int
    elapsed_ns: int
    checksums: tuple[str, ...]
    text: str

"""The directory of one engine's disk tier: lock, names, manifests, and the look at start
(contract: M7).

    <path>/engine-<k>/lock                   held for life by the engine that uses the directory
                      <stem>.r<rank>.part    one per rank: a safetensors file
                      <stem>.json            manifest, renamed into place last: the snapshot exists
                      *.new                  being written; removed at the next start

A snapshot is what its manifest says: which files, how long, of which checksum, for which engine.
Whatever is not, is removed: a part without a manifest, a manifest without all its parts, one of
another checkpoint or layout, a damaged one. Content is read, and its checksum compared, only when a
request wants it. No tensor passes through here; ranks write and read the parts.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.contracts.tiers import MANIFEST_ENDING, part_path
from flare_ray.controller.paging.chain import DIGEST_BYTES, StoredTrace
from flare_ray.errors import CapacityError, ConfigError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of manifests and of what parts hold; raised whenever either changes its meaning."""
MAX_MANIFEST_PAGES = 1664
"""Whole pages of the longest prefix that is written, 106,496 tokens: a manifest names the digest of
each, and its order must fit a message."""
MAX_ENGINES = 64
"""Engines that may share one path, each with a directory of its own."""
OURS = re.compile(r"[0-9a-f]{40}(\.r\d+\.part|\.json)(\.new)?")
"""Names this tier gives; nothing else in the directory is ever touched."""


class PartFile(msgspec.Struct, frozen=True):
    """One rank's file; `checksum` is the BLAKE2b of all of it."""

    num_bytes: int
    checksum: str


class DiskManifest(msgspec.Struct, frozen=True):
    """What makes a snapshot usable.

    Attributes:
        label: identity of the engines that may use it.
        digests: hexadecimal, of 0, 1, .. whole pages.
        tail: tokens behind them.
        parts: by rank.
    """

    version: int
    label: str
    tokens: int
    digests: tuple[str, ...]
    tail: tuple[int, ...]
    parts: tuple[PartFile, ...]


class _Sealed(msgspec.Struct, frozen=True):
    """A manifest file: a manifest and the checksum of its encoding."""

    checksum: str
    manifest: msgspec.Raw


_decode_sealed = msgspec.json.Decoder(_Sealed).decode
_decode_manifest = msgspec.json.Decoder(DiskManifest).decode


def sealed(manifest: DiskManifest) -> bytes:
    """Content of a manifest file."""
    raw = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(_checksum(raw), msgspec.Raw(raw)))


def unsealed(content: bytes) -> DiskManifest:
    """The manifest of a file.

    Raises:
        ValueError: it is damaged or of another version.
    """
    try:
        outer = _decode_sealed(content)
    except RecursionError:
        raise ValueError("it is nested like no manifest") from None
    if outer.checksum != _checksum(bytes(outer.manifest)):
        raise ValueError("its checksum differs")
    manifest = _decode_manifest(outer.manifest)
    if manifest.version != FORMAT_VERSION:
        raise ValueError(f"version {manifest.version}, this release reads {FORMAT_VERSION}")
    pages, rest = divmod(manifest.tokens, PAGE_TOKENS)
    if pages < 0 or len(manifest.digests) != pages + 1 or len(manifest.tail) != rest:
        raise ValueError(f"{manifest.tokens} tokens do not fit its digests and tail")
    if any(len(bytes.fromhex(digest)) != DIGEST_BYTES for digest in manifest.digests):
        raise ValueError("one of its digests has another length")
    return manifest


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"prefix_cache.disk_path: {folder} cannot be used: {error}; name a folder that this user "
        "may write, on a file system that locks"
    )


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A snapshot found at start.

    Attributes:
        stem: path of its files without their endings.
        file_bytes: of its largest part and the manifest.
    """

    stem: str
    trace: StoredTrace
    tokens: int
    file_bytes: int
    checksums: tuple[str, ...]


class DiskDirectory:
    """One engine's directory, locked until `close` or the end of the process.

    Attributes:
        folder: where the files lie.
        label: identity that files must carry.
        found: usable snapshots at start, oldest first.
        rejected: manifests at start that were damaged, incomplete or another engine's.
    """

    def __init__(self, folder: Path, lock_fd: int, label: str, world_size: int) -> None:
        self.folder = folder
        self.label = label
        self.world_size = world_size
        self.rejected = 0
        self._lock_fd = lock_fd
        self.found = list(self._look())

    @classmethod
    def open(cls, path: str, label: str, world_size: int) -> DiskDirectory:
        """Take the first directory below `path` that no running engine uses.

        Raises:
            ConfigError: the path cannot be written or locked.
            CapacityError: MAX_ENGINES engines use it already.
        """
        root = Path(path)
        for number in range(MAX_ENGINES):
            folder = root / f"engine-{number}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _unusable(folder, error) from error
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(folder, lock_fd, label, world_size)
            except BlockingIOError:
                os.close(lock_fd)
            except OSError as error:
                os.close(lock_fd)
                raise _unusable(folder, error) from error
        raise CapacityError(
            f"prefix_cache.disk_path: {MAX_ENGINES} engines use {root} already; give this one "
            "another path"
        )

    def new_stem(self) -> str:
        """Path for a new snapshot, without endings; never used before."""
        return str(self.folder / secrets.token_hex(20))

    def close(self) -> None:
        """Let another engine use the directory; idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _look(self) -> Iterator[StoredPrefix]:
        """Usable snapshots by the age of their manifests; everything else of ours is removed."""
        names = {name for name in os.listdir(self.folder) if OURS.fullmatch(name)}
        # a folder, link or pipe of such a name is nobody's snapshot, and reading it might never end
        names = {n for n in names if stat.S_ISREG(os.lstat(self.folder / n).st_mode)}
        manifests = [name for name in names if name.endswith(MANIFEST_ENDING)]
        manifests.sort(key=lambda name: (os.stat(self.folder / name).st_mtime_ns, name))
        kept: set[str] = set()
        for name in manifests:
            stem = str(self.folder / name.removesuffix(MANIFEST_ENDING))
            try:
                content = (self.folder / name).read_bytes()
                manifest = unsealed(content)
                self._check(manifest, stem)
            except (ValueError, OSError) as error:
                self.rejected += 1
                logger.warning("disk tier: %s is not usable and is removed: %s", name, error)
                continue
            kept.add(name)
            kept |= {Path(part_path(stem, rank)).name for rank in range(self.world_size)}
            digests = tuple(bytes.fromhex(digest) for digest in manifest.digests)
            yield StoredPrefix(
                stem=stem,
                trace=StoredTrace(digests, manifest.tail),
                tokens=manifest.tokens,
                file_bytes=len(content) + max(part.num_bytes for part in manifest.parts),
                checksums=tuple(part.checksum for part in manifest.parts),
            )
        leftovers = sorted(names - kept)
        # Manifests first: a kill between two removals must not leave one without its parts.
        for name in sorted(leftovers, key=lambda name: not name.endswith(MANIFEST_ENDING)):
            (self.folder / name).unlink(missing_ok=True)
        if leftovers:
            logger.info("disk tier: removed %d files of unfinished writes", len(leftovers))

    def _check(self, manifest: DiskManifest, stem: str) -> None:
        if manifest.label != self.label:
            raise ValueError("it belongs to another checkpoint, recipe, type or layout")
        if len(manifest.parts) != self.world_size:
            raise ValueError(f"{len(manifest.parts)} ranks wrote it, {self.world_size} run here")
        for rank, part in enumerate(manifest.parts):
            size = os.stat(part_path(stem, rank)).st_size
            if size != part.num_bytes:
                raise ValueError(f"rank {rank}'s part has {size} bytes of {part.num_bytes}")

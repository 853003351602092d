"""The host tier of one rank: an arena of bytes, copies to and from it, part files (contract: M7).

The controller says which region holds what; the arena keeps the id of each region's content besides
and refuses to hand out another one. Copies run on the mover's thread while programs run; what they
read and write is held by the controller meanwhile, but for one kind of bytes: in a snapshot's last
page its owner goes on writing. Those lie behind the snapshot's tokens, and whatever continues from
it writes them anew before it reads them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flare_ray.contracts.tiers import UNFINISHED_ENDING, TierOrder
from flare_ray.device.state.layout import StateLimits
from flare_ray.device.state.snapshot_layout import Place, SnapshotLayout
from flare_ray.device.state.store import TORCH_DTYPE, StateStore
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import StateSpec

WRITE_BYTES = 8 << 20
"""Bytes given to the operating system at once: other threads get their turn in between."""


class CorruptFile(Exception):
    """A part file is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a filled region holds."""

    entry: int
    tokens: int
    num_bytes: int


class SnapshotArena:
    """Host copies of one rank's snapshots.

    Args:
        num_bytes: of the arena; page-locked where the device is CUDA.
    Attributes:
        memory: [num_bytes] uint8.
    """

    def __init__(self, store: StateStore, spec: StateSpec, limits: StateLimits, num_bytes: int):
        self.layout = SnapshotLayout(spec, limits)
        # Written, so that the memory is there from the start and not taken page by page.
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=limits.device == "cuda")
        self._bytes = memoryview(self.memory.numpy())  # type: ignore[arg-type]
        self._store = store
        self._held: dict[int, Content] = {}

    def store(self, order: TierOrder) -> int:
        """Copy a snapshot row and its pages into a region; bytes copied."""
        size = self._claim(order)
        pages = self._page_ids(order)
        for place, region in self._regions(order):
            if place.paged:
                self._gather(self._store.groups[place.name], pages, region)
            else:
                region.copy_(self._row_tensor(place.name)[order.row], non_blocking=True)
        self._fill(order, size)
        return size

    def load(self, order: TierOrder) -> int:
        """Copy a region into a snapshot row and pages; bytes copied."""
        content = self._content(order)
        pages = self._page_ids(order)
        for place, region in self._regions(order):
            if place.paged:
                target = self._store.groups[place.name]
                target.index_copy_(0, pages, region.to(target.device, non_blocking=True))
            else:
                self._row_tensor(place.name)[order.row].copy_(region, non_blocking=True)
        return content.num_bytes

    def write(self, order: TierOrder, path: Path) -> tuple[int, str]:
        """Write a region as a part file, whole and durable before it has its name.

        Returns:
            The file's bytes and checksum.
        Raises:
            OSError: the file system refused; nothing of the file is left.
        """
        content = self._content(order)
        header = self.layout.header(order.tokens, order.label)
        data = self._bytes[order.offset : order.offset + content.num_bytes]
        digest = hashlib.blake2b(header, digest_size=32)

        def pieces() -> Iterator[bytes | memoryview]:
            yield header
            for start in range(0, len(data), WRITE_BYTES):
                piece = data[start : start + WRITE_BYTES]
                digest.update(piece)
                yield piece

        write_durably(path, pieces())
        return len(header) + len(data), digest.hexdigest()

    def read(self, order: TierOrder, path: Path, checksum: str) -> int:
        """Fill a region from a part file, checked; bytes read.

        Raises:
            CorruptFile: it is missing, of another length or header, or its checksum differs.
        """
        size = self._claim(order)
        header = self.layout.header(order.tokens, order.label)
        digest = hashlib.blake2b(header, digest_size=32)
        target = self._bytes[order.offset : order.offset + size]
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(header) + size:
                    raise CorruptFile(f"{path.name} has another length than its content")
                if file.read(len(header)) != header:
                    raise CorruptFile(f"{path.name} has another header than this engine writes")
                done = 0
                while done < size and (count := file.readinto(target[done : done + WRITE_BYTES])):
                    digest.update(target[done : done + count])
                    done += count
        except FileNotFoundError:
            raise CorruptFile(f"{path.name} is not there") from None
        if done != size or digest.hexdigest() != checksum:
            raise CorruptFile(f"{path.name} is damaged: its checksum differs")
        self._fill(order, size)
        return size

    def _claim(self, order: TierOrder) -> int:
        """Forget whatever lay in the region of an order that fills it; its bytes."""
        size = self.layout.num_bytes(order.tokens)
        end = order.offset + size
        if order.offset < 0 or end > len(self.memory):
            raise ContractViolation(
                f"region {order.offset}..{end} lies outside the arena of {len(self.memory)} bytes"
            )
        for offset, content in list(self._held.items()):
            if offset < end and order.offset < offset + content.num_bytes:
                # Mover and reader may claim neighbours that an older region covered both.
                self._held.pop(offset, None)
        return size

    def _fill(self, order: TierOrder, size: int) -> None:
        self._held[order.offset] = Content(order.entry, order.tokens, size)

    def _content(self, order: TierOrder) -> Content:
        content = self._held.get(order.offset)
        if content is None or (content.entry, content.tokens) != (order.entry, order.tokens):
            raise ContractViolation(
                f"region {order.offset} holds {content}, entry {order.entry} of {order.tokens} "
                "tokens was ordered"
            )
        return content

    def _regions(self, order: TierOrder) -> Iterator[tuple[Place, Tensor]]:
        for place in self.layout.places(order.tokens):
            start = order.offset + place.start
            raw = self.memory[start : start + place.num_bytes]
            yield place, raw.view(TORCH_DTYPE[place.dtype]).view(place.shape)

    def _row_tensor(self, name: str) -> Tensor:
        snapshots = self._store.snapshots
        if snapshots is None:
            raise ContractViolation("a snapshot is to be moved, none were prepared")
        if name == "tail":
            return snapshots.tail
        return snapshots.sampling_vector if name == "sampling_vector" else snapshots.rows[name]

    def _page_ids(self, order: TierOrder) -> Tensor:
        return torch.tensor(order.pages, dtype=torch.int64).to(self._store.limits.device)

    @staticmethod
    def _gather(pages: Tensor, ids: Tensor, region: Tensor) -> None:
        if pages.device.type == "cpu":
            torch.index_select(pages, 0, ids, out=region)
        else:
            region.copy_(pages.index_select(0, ids), non_blocking=True)


def write_durably(path: Path, pieces: Iterator[bytes | memoryview]) -> None:
    """Write a file under another name, flush it to the disk, then give it its name: whoever finds
    the name finds all of it, whatever is killed meanwhile.

    Raises:
        OSError: as the file system says; the unfinished file is removed.
    """
    unfinished = path.with_name(path.name + UNFINISHED_ENDING)
    try:
        with unfinished.open("wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        unfinished.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise

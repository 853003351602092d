"""How one snapshot lies in bytes: the same in a host region and in a part file (contract: M7).

    file    8 bytes: length of the header | header: JSON, padded | data
    data    each tensor of the snapshot row, then each page group's pages [n, ...], largest
            elements first, so that every tensor begins at a multiple of its element

It is a safetensors file: the header names each tensor with type, shape and place, and carries the
label of the engines that may use it. All of it follows from the state's allocations and the number
of tokens, so a reader knows every byte of the header beforehand and parses nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flare_ray.device.state.layout import (
    DTYPE_BYTES,
    Allocation,
    StateLimits,
    allocations,
    pages_for,
)
from flare_ray.recipes.declaration import StateSpec

SAFETENSORS_TYPE = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
HEADER_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a snapshot.

    Attributes:
        paged: a page group's; else a tensor of the snapshot row.
        shape: without the axis of rows; with the number of pages first where `paged`.
        start: first byte in the data.
    """

    name: str
    paged: bool
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Exact size."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class SnapshotLayout:
    """Places of a rank's snapshots.

    Args:
        limits: must prepare snapshot rows.
    """

    def __init__(self, spec: StateSpec, limits: StateLimits) -> None:
        self._kept = _kept(spec, limits)

    def places(self, tokens: int) -> Iterator[Place]:
        """Tensors of a snapshot of `tokens` tokens, in order."""
        start = 0
        for allocation in self._kept:
            paged = allocation.owner == "page"
            shape = allocation.shape[1:]
            if paged:
                shape = (pages_for(tokens), *shape)
            place = Place(allocation.name, paged, allocation.dtype, shape, start)
            start += place.num_bytes
            yield place

    def num_bytes(self, tokens: int) -> int:
        """Bytes of a snapshot's data."""
        return sum(place.num_bytes for place in self.places(tokens))

    def header(self, tokens: int, label: str) -> bytes:
        """First bytes of a part file, its length field included."""
        fields: dict[str, object] = {"__metadata__": {"label": label, "tokens": str(tokens)}}
        for place in self.places(tokens):
            name = f"page.{place.name}" if place.paged else f"row.{place.name}"
            fields[name] = {
                "dtype": SAFETENSORS_TYPE[place.dtype],
                "shape": list(place.shape),
                "data_offsets": [place.start, place.start + place.num_bytes],
            }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def layout_digest(spec: StateSpec, limits: StateLimits) -> str:
    """Digest of names, shapes and types of everything that a snapshot holds."""
    if not limits.snapshot_rows:
        return ""
    facts = [(a.owner, a.name, a.shape[1:], a.dtype) for a in _kept(spec, limits)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _kept(spec: StateSpec, limits: StateLimits) -> list[Allocation]:
    """What a snapshot holds, in order."""
    kept = (a for a in allocations(spec, limits) if a.owner in ("snapshot", "page"))
    return sorted(kept, key=_order)


def _order(allocation: Allocation) -> tuple[int, bool, str]:
    return -DTYPE_BYTES[allocation.dtype], allocation.owner == "page", allocation.name

"""Publication rows: one copy per slot of the state at the last crossed 64-boundary (contract: M4).

A queued round overwrites the columns, windows and rings of the round before it, so a state that may
become a prefix snapshot is copied inside the program that produced it. At most one of a round's
eight rows ends at a boundary. Lanes that cross none copy into the null slot's row, which keeps the
shapes static.

What is copied per group: a column's state after the boundary row, or what replaying the records up
to it makes of a replayed one; the `keep` window entries that are live after it; the whole ring,
whose later entries hold rows the boundary cannot see; a row group as it stands after the commit. A
recipe whose state at a past row cannot be read from a row group keeps it in a column or a ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.state.live import LiveState
from flare_ray.recipes.declaration import StateGroup


@dataclass(slots=True)
class Crossing:
    """Which lanes ended a row at a boundary, and where its state and outputs lie.

    Attributes:
        source: [B] int64 slot whose state is copied (the null slot where nothing ran).
        slots: [B] int64, the slot where a boundary was crossed, the null slot elsewhere.
        column: [B] int64, state column that holds the state at the boundary.
        epoch: [B] int64.
        consumed: [B] int64, tokens consumed at the boundary.
        feedback: [B, H] tail at the boundary.
        sampling: [B, Hs] head's input at the boundary.
    """

    source: Tensor
    slots: Tensor
    column: Tensor
    epoch: Tensor
    consumed: Tensor
    feedback: Tensor
    sampling: Tensor


class Publication:
    """Publication rows of all slots.

    Attributes:
        rows: group name -> [S + 1, *published shape].
        published: [S + 1, 2] int64, fields of `Published`: epoch and consumed tokens of the row;
            consumed 0 = nothing published under that epoch.
        tail: [S + 1, H]; sampling_vector: [S + 1, Hs].
    """

    def __init__(self, groups: tuple[StateGroup, ...], tensors: Mapping[str, Tensor]) -> None:
        self.published = tensors["published"]
        self._live = LiveState(groups, self.published.device)
        self.groups = self._live.groups
        self.rows = {group.name: tensors[group.name] for group in self.groups}
        self.tail = tensors["tail"]
        self.sampling_vector = tensors["sampling_vector"]

    def publish(self, crossing: Crossing, state: Mapping[str, Tensor]) -> None:
        """Copy the crossing lanes' boundary state; writes `rows` in place."""
        for group in self.groups:
            value = self._live.read(group, state, crossing.source, crossing.column)
            self.rows[group.name].index_copy_(0, crossing.slots, value)
        identity = torch.stack((crossing.epoch, crossing.consumed), dim=1)
        self.published.index_copy_(0, crossing.slots, identity)
        self.tail.index_copy_(0, crossing.slots, crossing.feedback.to(self.tail.dtype))
        vector = crossing.sampling.to(self.sampling_vector.dtype)
        self.sampling_vector.index_copy_(0, crossing.slots, vector)

    def forget(self, slot: int) -> None:
        """Drop a slot's row when the slot is handed to another request."""
        self.published[slot].zero_()

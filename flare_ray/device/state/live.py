"""Reading and setting a slot's live state, whatever the kind of a group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flare_ray.device.ops.gated_delta.records import Records, forget, replayed
from flare_ray.device.state.layout import lasting_groups
from flare_ray.recipes.declaration import StateGroup


class LiveState:
    """The live part of every group that lives per slot.

    Args:
        groups: of a rank.
        device: of the state.
    Attributes:
        groups: those whose live state can be copied.
    """

    def __init__(self, groups: tuple[StateGroup, ...], device: torch.device) -> None:
        self.groups = lasting_groups(groups)
        self._offsets = {
            group.name: torch.arange(1, group.keep + 1, device=device)
            for group in self.groups
            if group.kind == "window"
        }

    def read(
        self, group: StateGroup, state: Mapping[str, Tensor], slots: Tensor, column: Tensor
    ) -> Tensor:
        """Live state of R slots [R, *published shape].

        Args:
            slots: [R] int64.
            column: [R] int64, the row of the last round after which the state is live.
        """
        tensor = state[group.name]
        if group.kind == "column":
            return tensor[slots, column]
        if group.kind == "window":
            return tensor[slots.unsqueeze(1), column.unsqueeze(1) + self._offsets[group.name]]
        if group.kind == "replayed":
            return replayed(tensor, records_of(group, state), slots, column + 1)
        return tensor.index_select(0, slots)

    def write(
        self, group: StateGroup, state: Mapping[str, Tensor], slot: int, value: Tensor
    ) -> None:
        """Make `value` [*published shape] the live state of a slot whose live column is 0."""
        target = state[group.name][slot]
        if group.kind == "column":
            target[0].copy_(value)
        elif group.kind == "window":
            target[1 : 1 + group.keep].copy_(value)
        else:
            target.copy_(value)
        if group.kind == "replayed":
            # Filled on the device: a copy from the host would wait for the stream.
            slots = torch.full((1,), slot, dtype=torch.int64, device=value.device)
            forget(records_of(group, state), slots)


def records_of(group: StateGroup, state: Mapping[str, Tensor]) -> Records:
    """The records that a replayed group names."""
    assert group.records is not None
    return Records(*(state[name] for name in group.records))

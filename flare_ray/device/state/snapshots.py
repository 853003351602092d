"""Snapshot rows: immutable copies of a slot's state after exactly N tokens (contract: M4, M5).

A row holds what a publication row holds: each group's live state, the drafter's feedback tail and
the head's input. Restored, that state becomes column 0 and the first entries of a window, as a
prefill would have left it. A row is written once per snapshot and read by any number of slots; the
host alone knows which tokens it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flare_ray.device.state.layout import Core
from flare_ray.device.state.live import LiveState
from flare_ray.device.state.publication import Publication
from flare_ray.device.state.request import RequestState
from flare_ray.recipes.declaration import StateGroup


class SnapshotRows:
    """Snapshot rows of one rank.

    Attributes:
        rows: group name -> [M, *published shape].
        tail: [M, H]; sampling_vector: [M, Hs].
    """

    def __init__(self, groups: tuple[StateGroup, ...], tensors: Mapping[str, Tensor]) -> None:
        self.tail = tensors["tail"]
        self.sampling_vector = tensors["sampling_vector"]
        self._live = LiveState(groups, self.tail.device)
        self.groups = self._live.groups
        self.rows = {group.name: tensors[group.name] for group in self.groups}

    def save_published(self, row: int, slot: int, publication: Publication) -> None:
        """Take over a slot's publication row."""
        for group in self.groups:
            self.rows[group.name][row].copy_(publication.rows[group.name][slot])
        self.tail[row].copy_(publication.tail[slot])
        self.sampling_vector[row].copy_(publication.sampling_vector[slot])

    def save_live(
        self, row: int, slot: int, state: Mapping[str, Tensor], request: RequestState
    ) -> None:
        """Copy a slot's live state; which column is live is read on the device."""
        column = request.core[slot, Core.COLUMN].view(1)
        # Filled on the device: a copy from the host would wait for the stream.
        slots = torch.full((1,), slot, dtype=torch.int64, device=column.device)
        for group in self.groups:
            self.rows[group.name][row].copy_(self._live.read(group, state, slots, column)[0])
        if request.tail is not None:
            self.tail[row].copy_(request.tail[slot])
        if request.sampling_vector is not None:
            self.sampling_vector[row].copy_(request.sampling_vector[slot])

    def restore(
        self, row: int, slot: int, state: Mapping[str, Tensor], request: RequestState
    ) -> None:
        """Make a row's state the live one of a fresh slot, whose live column is 0."""
        for group in self.groups:
            self._live.write(group, state, slot, self.rows[group.name][row])
        if request.tail is not None:
            request.tail[slot].copy_(self.tail[row])
        if request.sampling_vector is not None:
            request.sampling_vector[slot].copy_(self.sampling_vector[row])

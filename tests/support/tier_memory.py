"""Poison for what the host tier of a rank does not hold."""

from __future__ import annotations

import numpy as np

from flare_ray.device.state.snapshot_host import SnapshotArena


def poison_free(arena: SnapshotArena) -> None:
    """Overwrite every byte of the arena that no filled region holds; 0xFF.. is NaN as a float."""
    memory = arena.memory.numpy()
    free = np.ones(len(memory), dtype=bool)
    for offset, content in list(arena._held.items()):
        free[offset : offset + content.num_bytes] = False
    memory[free] = 0xFF

"""Engines for the tests of captured programs: the same checkpoint, captured and eager."""

from __future__ import annotations

from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.device.executor import RankExecutor
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import prepare_rank

WIDTHS = (1, 2, 3, 4, 6, 8)


def config_of(folder: Path, *, eager: bool = False, **fields: object) -> EngineConfig:
    """A float32 engine of four slots on the device, freed memory poisoned and books compared."""
    settings: dict[str, object] = {
        "device": "cuda",
        "dtype": "float32",
        "concurrency": 4,
        "context_tokens": 512,
        "prefill_tokens": 64,
        "debug_checks": True,
        **fields,
    }
    return EngineConfig(checkpoint=str(folder), eager=eager, **settings)


def rank_of(folder: Path, *, eager: bool = False, **fields: object) -> RankExecutor:
    """One prepared rank."""
    return prepare_rank(config_of(folder, eager=eager, **fields), SingleGroup())

"""What the settings keep packed or off the device, and what one rank then holds (contract: M6,
M8)."""

from __future__ import annotations

from collections.abc import Sequence

from flare_ray.config import EngineConfig
from flare_ray.device.state.layout import DTYPE_BYTES
from flare_ray.device.weights.budget import HeldBytes, held_bytes
from flare_ray.device.weights.kept import Keeping, held_forms
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, Recipe, TensorSpec


def keeping_of(config: EngineConfig) -> Keeping:
    """What the settings say about packed experts and tables."""
    return Keeping(config.device, config.expert_weights, config.tables)


def weights_held(
    config: EngineConfig, recipe: Recipe, specs: Sequence[TensorSpec], families: Sequence[Family]
) -> HeldBytes:
    """One rank's weights as they will be held.

    Args:
        specs: the recipe's manifest.
        families: families that are loaded.
    Raises:
        ConfigError: something was asked to be held as it cannot be.
    """
    _check_tables(config, recipe, specs)
    form_of = held_forms(
        config.checkpoint,
        specs,
        keeping_of(config),
        world_size=config.tensor_parallel_size,
        families=families,
    )
    return held_bytes(
        specs,
        world_size=config.tensor_parallel_size,
        element_bytes=DTYPE_BYTES[config.dtype],
        families=families,
        form_of=form_of,
    )


def _check_tables(config: EngineConfig, recipe: Recipe, specs: Sequence[TensorSpec]) -> None:
    if config.tables == "device":
        return
    if not any(spec.table for spec in specs):
        raise ConfigError(
            f"tables is {config.tables}, this checkpoint of {recipe.name} has no tables; leave "
            "tables out"
        )
    if config.tables == "disk" and config.device == "cuda":
        raise ConfigError(
            "tables: disk runs with device: cpu alone, since a captured program cannot wait for a "
            "file; set tables: host or tables: device"
        )

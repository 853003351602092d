"""A rank's model, put together from a plan by the recipe's builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.device.executor import ModelParts
from flare_ray.device.speculation.undrafted import Undrafted
from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import (
    BuildOptions,
    Communicator,
    Drafter,
    Family,
    Recipe,
    resolve,
)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What preparation decided, with the recipe's parts that loading needs.

    Attributes:
        families: tensor families that are loaded.
    """

    manifest: PreparedManifest
    recipe: Recipe
    geometry: Any
    families: tuple[Family, ...]


def build_parts(plan: EnginePlan, weights: RankWeights | None, comm: Communicator) -> ModelParts:
    """Target, drafter and state of one rank.

    Args:
        weights: open; None for a recipe without tensors.
    Raises:
        ConfigError, CheckpointError, ContractViolation: as the recipe's builders.
    """
    manifest, recipe, geometry = plan.manifest, plan.recipe, plan.geometry
    options = BuildOptions(
        device=manifest.device,
        dtype=manifest.dtype,
        prefill_tokens=manifest.prefill_tokens,
        max_width=manifest.draft_tokens + 1,
    )
    target = resolve(recipe.target)(geometry, weights, comm, options)
    drafter: Drafter | None = None
    if manifest.speculation and geometry.num_drafter_layers:
        drafter = resolve(recipe.drafter)(geometry, weights, comm, options)
    elif manifest.speculation:
        drafter = Undrafted()
    if weights is not None:
        for family in plan.families:
            weights.assert_all_used(family)
    return ModelParts(resolve(recipe.state)(geometry, comm.size), target, drafter)

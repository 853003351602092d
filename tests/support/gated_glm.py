"""The GLM recipe with a gate in the last rank's target: no pass ends before a file exists.

Named as `recipe: tests.support.gated_glm:RECIPE`; the file's name comes from the environment, which
a service hands to its ranks. The gate touches a file of its own when a pass stands before it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flare_ray.device.weights.loader import RankWeights
from flare_ray.recipes.declaration import BuildOptions, Communicator, Rows, TargetOutput
from flare_ray.recipes.glm5_next import recipe
from flare_ray.recipes.glm5_next.geometry import Geometry
from flare_ray.recipes.glm5_next.target import GlmTarget
from flare_ray.recipes.glm5_next.target import build_target as build_plain

GATE = "FLARE_TEST_GATE"
DOTTED = f"{__name__}:RECIPE"
RECIPE = dataclasses.replace(recipe.RECIPE, name="gated-glm", target=f"{__name__}:build_target")
LOOK_S = 0.02


def reached(gate: Path) -> Path:
    """What the gate touches when a pass stands before it."""
    return gate.with_suffix(".reached")


class Gated:
    """A target behind the gate; passes freely once it has been open."""

    def __init__(self, target: GlmTarget, gate: Path) -> None:
        self._target = target
        self._gate = gate

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        if not self._gate.exists():
            reached(self._gate).touch()
        while not self._gate.exists():
            time.sleep(LOOK_S)
        return self._target.forward(rows, state)

    def head(self, sampling: Tensor) -> Tensor:
        return self._target.head(sampling)

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        self._target.commit(rows, emitted, state)


def build_target(
    geometry: Geometry, weights: RankWeights, comm: Communicator, options: BuildOptions
) -> GlmTarget | Gated:
    target = build_plain(geometry, weights, comm, options)
    last = comm.rank == comm.size - 1
    return Gated(target, Path(os.environ[GATE])) if last else target

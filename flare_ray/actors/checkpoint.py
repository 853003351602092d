"""A checkpoint against its recipe, from headers alone, before anything is placed (contract: R5).

Ranks check the same before they load. By then Serve has reserved an engine's places and started its
processes, and does so again for each attempt to construct it: a damaged download would be refused
after most of a minute.
"""

from __future__ import annotations

import json
from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.device.weights.arithmetic import check_arithmetic
from flare_ray.device.weights.manifest import BOTH_FAMILIES, open_validated
from flare_ray.errors import CheckpointError
from flare_ray.recipes.declaration import Family, resolve
from flare_ray.recipes.registry import find_recipe


def check_checkpoint(config: EngineConfig) -> None:
    """Refuse a checkpoint on this host that a rank of this engine would refuse.

    Reads config.json and the headers of the weight files: about a second for hundreds of files.

    Raises:
        CheckpointError: config.json is damaged or of another geometry; `problems` names each
            missing, extra, misshapen, mistyped or truncated tensor; or the checkpoint declares
            arithmetic that the configuration does not answer.
        ConfigError: no recipe serves it.
    """
    folder = Path(config.checkpoint)
    document = _config_json(folder / "config.json")
    recipe = find_recipe(document, name=config.recipe)
    specs = resolve(recipe.manifest)(resolve(recipe.geometry)(document))
    if not specs:
        return  # a recipe without tensors has no files to check
    ordinary = config.speculation.families == "ordinary"
    families: tuple[Family, ...] = ("target",) if ordinary else BOTH_FAMILIES
    index, validated = open_validated(
        folder, specs, families=families, tolerated_prefixes=recipe.tolerated_prefixes
    )
    check_arithmetic(
        index,
        validated,
        kv_dtype=config.kv_dtype,
        quantised_activations=config.quantised_activations,
    )


def _config_json(file: Path) -> dict[str, object]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a readable config.json: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds {type(document).__name__}, expected an object")
    return document

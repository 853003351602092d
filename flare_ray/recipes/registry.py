"""Which recipes exist, and which one a checkpoint needs; the only file outside the recipe folders
that names families (contract: R1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Recipe, resolve
from flare_ray.recipes.deepseek_v41.recipe import RECIPE as DEEPSEEK_V4_1_FLASH
from flare_ray.recipes.glm5_next.recipe import RECIPE as GLM_5_3_FLASH
from flare_ray.recipes.llama.recipe import RECIPE as LLAMA
from flare_ray.recipes.qwen4_exp.recipe import RECIPE as QWEN_3_8_FLASH

_RECIPES: tuple[Recipe, ...] = (GLM_5_3_FLASH, DEEPSEEK_V4_1_FLASH, QWEN_3_8_FLASH, LLAMA)


def recipes() -> tuple[Recipe, ...]:
    """Every recipe of this package."""
    return _RECIPES


def get(name: str) -> Recipe:
    """The recipe called `name`, or the one at `module:attribute` for a recipe kept elsewhere.

    Raises:
        ConfigError: no recipe has this name, or nothing importable has this path.
    """
    if ":" in name:
        return _imported(name)
    for recipe in _RECIPES:
        if recipe.name == name:
            return recipe
    raise ConfigError(f"recipe {name!r} does not exist; choose one of: {_names()}")


def for_config(config: Mapping[str, Any]) -> Recipe:
    """The recipe that a checkpoint's config.json names by `architectures` or `model_type`.

    Raises:
        ConfigError: no recipe serves them, or several do.
    """
    architectures = tuple(config.get("architectures") or ())
    model_type = config.get("model_type")
    found = [r for r in _RECIPES if set(architectures) & set(r.architectures)]
    found = found or [r for r in _RECIPES if model_type in r.model_types]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"config.json has architectures {list(architectures)} and model_type {model_type!r}, which "
        f"{'several recipes serve' if found else 'no recipe serves'}; set `recipe` to one of "
        f"{_names()}, or use another checkpoint"
    )


def packaged() -> dict[str, str]:
    """Every model that a Python package holds, and the path of what fetches it."""
    return {name: path for recipe in _RECIPES for name, path in recipe.packaged.items()}


def find_recipe(config: Mapping[str, Any], *, name: str | None = None) -> Recipe:
    """The recipe `name` if one is given, else the one config.json asks for.

    Raises:
        ConfigError: unknown name, or nothing serves the checkpoint.
    """
    return get(name) if name is not None else for_config(config)


def _imported(dotted: str) -> Recipe:
    try:
        found: object = resolve(dotted)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"recipe {dotted!r} cannot be imported: {error}; give module:attribute of a recipe, or "
            f"one of: {_names()}"
        ) from error
    if not isinstance(found, Recipe):
        raise ConfigError(
            f"recipe {dotted!r} is {type(found).__name__}, not a Recipe; give the attribute that "
            "holds the declaration"
        )
    return found


def _names() -> str:
    return ", ".join(recipe.name for recipe in _RECIPES)

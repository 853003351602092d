"""Finding a recipe by name, by architecture, by model type, or by import path."""

from __future__ import annotations

import pytest

from flare_ray.errors import ConfigError
from flare_ray.recipes import registry
from flare_ray.recipes.declaration import resolve


def test_names_architectures_and_model_types_are_unique():
    for field in ("architectures", "model_types"):
        names = [name for recipe in registry.recipes() for name in getattr(recipe, field)]
        assert len(names) == len(set(names))
    assert len({recipe.name for recipe in registry.recipes()}) == len(registry.recipes())


@pytest.mark.parametrize("recipe", registry.recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_is_found_by_each_of_its_names(recipe):
    assert registry.get(recipe.name) is recipe
    for name in recipe.architectures:
        assert registry.for_config({"architectures": [name], "model_type": "other"}) is recipe
    for name in recipe.model_types:
        assert registry.for_config({"model_type": name}) is recipe
    assert registry.find_recipe({}, name=recipe.name) is recipe


@pytest.mark.parametrize("recipe", registry.recipes(), ids=lambda recipe: recipe.name)
def test_every_builder_of_a_recipe_exists(recipe):
    for dotted in (recipe.geometry, recipe.manifest, recipe.state, recipe.target, recipe.drafter):
        assert callable(resolve(dotted))


def test_a_recipe_kept_elsewhere_is_imported_by_its_path():
    dotted = "flare_ray.recipes.glm5_next.recipe:RECIPE"
    assert registry.get(dotted) is registry.get("glm-5.3-flash")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("glm", "choose one of: glm-5.3-flash"),
        ("no.such.module:RECIPE", "cannot be imported"),
        ("flare_ray.errors:NOTHING", "cannot be imported"),
        ("flare_ray.errors:FlareError", "not a Recipe"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(name, part):
    with pytest.raises(ConfigError, match=part):
        registry.get(name)


def test_an_unserved_checkpoint_is_refused_with_what_it_says():
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*'gpt2'.*no recipe serves"):
        registry.find_recipe({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})

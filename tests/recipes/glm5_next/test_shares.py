"""What each rank holds."""

from __future__ import annotations

from flare_ray.recipes.declaration import resolve
from flare_ray.recipes.glm5_next.recipe import RECIPE


def test_each_rank_holds_its_share_of_recurrent_state(load_tiny):
    driver = load_tiny("wide").driver
    whole = {g.name: g for g in resolve(RECIPE.state)(driver.geometry, 1).groups}
    for group in resolve(RECIPE.state)(driver.geometry, 4).groups:
        one = whole[group.name]
        if group.kind == "column":
            assert group.shape == (one.shape[0] // 4, *one.shape[1:]) and group.sharded
        elif group.kind == "window":
            assert group.shape == (one.shape[0] // 4,) and group.sharded
        else:
            assert group.shape == one.shape and not group.sharded

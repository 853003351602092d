"""The recipe of GLM-5.3-Flash (`glm5_next`): read recipe.py first, then README.md."""

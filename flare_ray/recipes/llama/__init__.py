"""The recipe of the Llama family (`llama`): read recipe.py first, then README.md."""

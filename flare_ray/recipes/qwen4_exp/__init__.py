"""The recipe of Qwen3.8-Flash (`qwen4_exp`): read recipe.py first, then README.md."""

"""The recipe of DeepSeek-V4.1-Flash (`deepseek_v41`): read recipe.py first, then README.md."""

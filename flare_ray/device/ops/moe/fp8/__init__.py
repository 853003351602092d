"""Routed experts whose weights stay in block FP8 (W8A16)."""

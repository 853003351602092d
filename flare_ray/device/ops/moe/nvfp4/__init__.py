"""Routed experts whose weights stay packed in NVFP4 (W4A16)."""

"""Routed experts whose weights stay packed in four bits: NVFP4 as W4A16, and MXFP4."""

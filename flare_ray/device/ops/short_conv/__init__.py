"""Causal depthwise convolution over a few rows of history."""

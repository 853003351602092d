"""Activations as 16-bit integers per group of 16 channels."""

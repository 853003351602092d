"""Rounding of cached keys to low-precision grids, as a model was trained with."""

"""Vectors of sixteen floats in registers, for CPU kernels that numba would not vectorise well."""

"""Compiling kernels where there is no device."""

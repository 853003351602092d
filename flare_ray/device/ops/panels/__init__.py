"""Products by matrices stored in panels, for CPU kernels."""

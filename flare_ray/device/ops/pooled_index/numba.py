"""Pooling on CPU: one pass per pool and channel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, kernel, matrix


@kernel("iiiiii")
def _run(rows, ape, out, pools, pool, dim):
    # Each row of a pool is its key and, behind it, its gate.
    values = cube(rows, pools, pool, 2 * dim, np.float32)
    shift, results = matrix(ape, pool, dim, np.float32), matrix(out, pools, dim, np.float32)
    for p in range(pools):
        for i in range(dim):
            highest = np.float32(-np.inf)
            for t in range(pool):
                highest = max(highest, values[p, t, dim + i] + shift[t, i])
            total, mixed = np.float32(0.0), np.float32(0.0)
            for t in range(pool):
                weight = np.exp(values[p, t, dim + i] + shift[t, i] - highest)
                total += weight
                mixed += weight * values[p, t, i]
            results[p, i] = mixed / total


def pool_keys(rows: Tensor, ape: Tensor) -> Tensor:
    """As `api.pool_keys`, float32."""
    rows = rows.contiguous()
    pools, pool, _, dim = rows.shape
    out = torch.empty((pools, dim))
    _run(rows.data_ptr(), ape.data_ptr(), out.data_ptr(), pools, pool, dim)
    return out

"""RMS norm on CPU in one pass per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.numba import kernel, matrix, vector


@kernel("iiiiiif")
def _run(x, weight, out, rows, size, stride, eps):
    # A view of wider rows: only the first `size` of each `stride` belong to it.
    values = vector(x, (rows - 1) * stride + size, np.float32)
    factors, results = vector(weight, size, np.float32), matrix(out, rows, size, np.float32)
    for row in range(rows):
        line = values[row * stride : row * stride + size]
        total = np.float32(0.0)
        for i in range(size):
            total += line[i] * line[i]
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / size + eps))
        for i in range(size):
            results[row, i] = line[i] * scale * factors[i]


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `reference.rmsnorm` for x [R, n] and weight [n], float32; x may be part of wider rows."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape[0], weight.shape[0]
    expect_shape("x", x, rows, size)
    out = torch.empty((rows, size))
    if rows:
        _run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, x.stride(0), eps)
    return out

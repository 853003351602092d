"""RMS norm on CPU in one pass per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.numba import kernel, matrix, vector


@kernel("iiiiiiif")
def _run(x, weight, out, rows, groups, size, stride, eps):
    # A view of wider rows: only the first `groups * size` of each `stride` belong to it.
    width = groups * size
    values = vector(x, (rows - 1) * stride + width, np.float32)
    factors, results = (
        matrix(weight, groups, size, np.float32),
        vector(out, rows * width, np.float32),
    )
    for row in range(rows):
        for group in range(groups):
            at = row * stride + group * size
            line = values[at : at + size]
            place = row * width + group * size
            result = results[place : place + size]
            total = np.float32(0.0)
            for i in range(size):
                total += line[i] * line[i]
            scale = np.float32(1.0 / np.sqrt(np.float64(total) / size + eps))
            for i in range(size):
                result[i] = line[i] * scale * factors[group, i]


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, groups: int = 1) -> Tensor:
    """As `reference.rmsnorm` for x [R, n] and weight [n], float32; x may be part of wider rows.

    Args:
        groups: equal parts of a row, each normalised by itself.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape[0], weight.shape[0]
    expect_shape("x", x, rows, size)
    out = torch.empty((rows, size))
    if rows:
        sizes = (rows, groups, size // groups, x.stride(0))
        _run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes, eps)
    return out

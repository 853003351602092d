"""Layer norm on CPU, row by row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import kernel, matrix, vector


@kernel("iiiiiiif")
def _run(x, weight, bias, out, rows, size, stride, eps):
    # A view of wider rows: only the first `size` of each `stride` belong to it.
    values, results = (
        vector(x, (rows - 1) * stride + size, np.float32),
        matrix(out, rows, size, np.float32),
    )
    factors, offsets = vector(weight, size, np.float32), vector(bias, size, np.float32)
    for row in range(rows):
        line, result = values[row * stride : row * stride + size], results[row]
        total, squares = np.float32(0.0), np.float32(0.0)
        for i in range(size):
            total += line[i]
        mean = np.float32(total / size)
        for i in range(size):
            squares += (line[i] - mean) * (line[i] - mean)
        scale = np.float32(1.0 / np.sqrt(np.float64(squares) / size + eps))
        for i in range(size):
            result[i] = (line[i] - mean) * scale * factors[i] + offsets[i]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """As `api.layer_norm`, every operand float32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    rows, size = x.shape
    out = torch.empty((rows, size))
    if rows:
        sizes = (rows, size, x.stride(0))
        _run(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), *sizes, eps)
    return out

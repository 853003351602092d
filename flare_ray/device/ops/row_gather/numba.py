"""Rows copied byte by byte, whatever they hold and wherever their part lies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import kernel, matrix, vector


@kernel("iiiiii")
def _gather(addresses, numbers, out, count, rows, row_bytes):
    parts, wanted = vector(addresses, 1, np.int64), vector(numbers, count, np.int64)
    lines = matrix(out, count, row_bytes, np.uint8)
    for i in range(count):
        part = wanted[i] // rows
        source = parts[part] + (wanted[i] - part * rows) * row_bytes
        lines[i] = vector(source, row_bytes, np.uint8)


def gather(addresses: Tensor, numbers: Tensor, *, rows: int, like: Tensor) -> Tensor:
    """Rows [R, D] of tensors at the given addresses.

    Args:
        addresses: [parts] int64 of contiguous tensors [rows, D] like `like`.
        numbers: [R] int64, each below parts * rows.
    """
    numbers = numbers.contiguous()
    count, columns = numbers.shape[0], like.shape[1]
    row_bytes = columns * like.element_size()
    out = torch.empty((count, row_bytes), dtype=torch.uint8)
    _gather(addresses.data_ptr(), numbers.data_ptr(), out.data_ptr(), count, rows, row_bytes)
    return out.view(like.dtype)

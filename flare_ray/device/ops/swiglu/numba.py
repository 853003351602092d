"""Bounded SwiGLU of fused gate-and-up rows on CPU: every element by itself, whereas torch's has
other last bits in a vector's rest than inside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import kernel, matrix


@kernel("iiiif")
def _run(both, out, rows, width, limit):
    values, results = (
        matrix(both, rows, 2 * width, np.float32),
        matrix(out, rows, width, np.float32),
    )
    bound = np.float32(limit)
    for row in range(rows):
        for i in range(width):
            gate, up = min(values[row, i], bound), min(values[row, width + i], bound)
            results[row, i] = gate / (np.float32(1.0) + np.exp(-gate)) * max(up, -bound)


def clamped_swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """[..., 2 I] float32 -> [..., I]."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width))
    rows = out.numel() // max(width, 1)
    _run(gate_up.data_ptr(), out.data_ptr(), rows, width, limit)
    return out

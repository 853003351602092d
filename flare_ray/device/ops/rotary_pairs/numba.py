"""Pairs of channels turned on CPU, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import kernel, matrix


@kernel("iiiiiiii", ordered=True)
def _run(x, phase, out, rows, heads, dim, pairs, back):
    turns = matrix(phase, rows, 2 * pairs, np.float32)
    values, results = (
        matrix(x, rows * heads, dim, np.float32),
        matrix(out, rows * heads, dim, np.float32),
    )
    kept = dim - 2 * pairs
    side = np.float32(-1.0) if back else np.float32(1.0)
    for line in range(rows * heads):
        turn, source, target = turns[line // heads], values[line], results[line]
        target[:kept] = source[:kept]
        for pair in range(pairs):
            at = kept + 2 * pair
            cosine, sine = turn[2 * pair], side * turn[2 * pair + 1]
            target[at] = source[at] * cosine - source[at + 1] * sine
            target[at + 1] = source[at] * sine + source[at + 1] * cosine


def rotate(x: Tensor, phase: Tensor, *, back: bool) -> Tensor:
    """As `api.rotate`, x float32."""
    x, phase = x.contiguous(), phase.contiguous()
    out = torch.empty_like(x)
    rows, dim = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    sizes = (rows, heads, dim, phase.shape[1], int(back))
    _run(x.data_ptr(), phase.data_ptr(), out.data_ptr(), *sizes)
    return out

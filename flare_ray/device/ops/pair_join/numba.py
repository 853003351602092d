"""A pair's two normalised halves on CPU, in one pass per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.numba import inner, kernel, matrix, vector


@inner
def _norm(line, factors, result, eps):
    size = line.shape[0]
    total = np.float32(0.0)
    for i in range(size):
        total += line[i] * line[i]
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / size + eps))
    for i in range(size):
        result[i] = line[i] * scale * factors[i]


@kernel("iiiiiiiiif")
def _join(table, tokens, hidden, positions, first, second, out, rows, shape, eps):
    """`shape` = rows of the table * 2**32 + size of a half."""
    entries, size = shape >> 32, shape & 0xFFFFFFFF
    embedded, states = (
        matrix(table, entries, size, np.float32),
        matrix(hidden, rows, size, np.float32),
    )
    token, position = vector(tokens, rows, np.int64), vector(positions, rows, np.int64)
    factors, other = vector(first, size, np.float32), vector(second, size, np.float32)
    results = matrix(out, rows, 2 * size, np.float32)
    for row in range(rows):
        if position[row] == 0:
            results[row, :size] = np.float32(0.0)
        else:
            _norm(embedded[token[row]], factors, results[row, :size], eps)
        _norm(states[row], other, results[row, size:], eps)


def joined(
    table: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor],
    *,
    eps: float,
) -> Tensor:
    """As `reference.joined` with the norms' weights, float32."""
    rows, size = hidden.shape
    expect_shape("tokens", tokens, rows)
    expect_shape("positions", positions, rows)
    for norm in norms:
        expect_shape("norm", norm, size)
    out = torch.empty((rows, 2 * size))
    # Named, since a copy must live until the call returns.
    inputs = [t.contiguous() for t in (table, tokens, hidden, positions, *norms)]
    addresses = [t.data_ptr() for t in inputs]
    _join(*addresses, out.data_ptr(), rows, (table.shape[0] << 32) | size, eps)
    return out

"""The chosen experts of a few rows on CPU: only their weights are read, and nothing is gathered."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.linear.numba import dot1
from flare_ray.device.ops.numba import cube, float_rows, inner, kernel, matrix, widen


class StoredExperts(NamedTuple):
    """gate_up [E + shared, 2 I, H] and down [E + shared, I, H] of one stored type."""

    gate_up: Tensor
    down: Tensor


@inner
def add_expert(x, gate_up, down, out, row, weight, limit):
    """out[row] += weight * expert(x[row])."""
    width = down.shape[0]
    for i in range(width):
        gate = min(dot1(x, gate_up[i], row), limit)
        up = min(max(dot1(x, gate_up[width + i], row), -limit), limit)
        active = weight * up * gate / (np.float32(1.0) + np.exp(-gate))
        line = down[i]
        for j in range(line.shape[0]):
            out[row, j] += active * widen(line[j])


@inner
def add_experts(x, gate_up, down, routing, out, shared, limit):
    """The chosen experts of every row, then the shared ones, which come last."""
    chosen, weights = routing
    bound = np.float32(limit)
    for row in range(x.shape[0]):
        out[row] = np.float32(0.0)
        for place in range(chosen.shape[1]):
            expert = chosen[row, place]
            add_expert(x, gate_up[expert], down[expert], out, row, weights[row, place], bound)
        for expert in range(gate_up.shape[0] - shared, gate_up.shape[0]):
            add_expert(x, gate_up[expert], down[expert], out, row, np.float32(1.0), bound)


@kernel("iiiiiiiiiiiiif")
def _run(
    x, gate_up, down, chosen, weights, out, rows, top_k, total, width, hidden, shared, narrow, limit
):
    values, results = matrix(x, rows, hidden, np.float32), matrix(out, rows, hidden, np.float32)
    routing = (matrix(chosen, rows, top_k, np.int64), matrix(weights, rows, top_k, np.float32))
    if narrow:
        first = cube(gate_up, total, 2 * width, hidden, np.uint16)
        second = cube(down, total, width, hidden, np.uint16)
        add_experts(values, first, second, routing, results, shared, limit)
    else:
        wide_first = cube(gate_up, total, 2 * width, hidden, np.float32)
        wide_second = cube(down, total, width, hidden, np.float32)
        add_experts(values, wide_first, wide_second, routing, results, shared, limit)


def chosen_experts(
    x: Tensor, held: StoredExperts, experts: Tensor, weights: Tensor, *, shared: int, limit: float
) -> Tensor:
    """As `Experts.__call__` for rows x [R, H] float32; the shared experts are included."""
    total, width, hidden = held.down.shape
    x = float_rows(x, hidden)
    experts, weights = experts.contiguous(), weights.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, hidden))
    _run(
        x.data_ptr(),
        held.gate_up.data_ptr(),
        held.down.data_ptr(),
        experts.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        rows,
        experts.shape[1],
        total,
        width,
        hidden,
        shared,
        held.down.dtype == torch.bfloat16,
        limit,
    )
    return out

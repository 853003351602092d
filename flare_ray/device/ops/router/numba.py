"""Routing on CPU, row by row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import dot1, inner_ordered, kernel, matrix, vector


@inner_ordered
def _choose(scores, bias, chosen, weights, scale):
    """The best of one row by score + bias, the lower of equals first."""
    total = np.float32(0.0)
    for place in range(chosen.shape[0]):
        best = -1
        for expert in range(scores.shape[0]):
            taken = False
            for before in range(place):
                taken = taken or chosen[before] == expert
            if taken:
                continue
            if best < 0 or scores[expert] + bias[expert] > scores[best] + bias[best]:
                best = expert
        chosen[place] = best
        weights[place] = scores[best]
        total += scores[best]
    for place in range(chosen.shape[0]):
        weights[place] = weights[place] / (total + np.float32(1e-20)) * np.float32(scale)


@inner_ordered
def _sigmoid(product):
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-product))


@inner_ordered
def _root(product):
    """sqrt(softplus), linear from 20 on as torch has it."""
    if product > np.float32(20.0):
        return np.sqrt(product)
    return np.sqrt(np.log1p(np.exp(product)))


@kernel("iiiiiiiiiif", ordered=True)
def _run(x, weight, bias, chosen, weights, rows, hidden, experts, top_k, softplus, scale):
    values, matrix_rows = (
        matrix(x, rows, hidden, np.float32),
        matrix(weight, experts, hidden, np.float32),
    )
    results, shares = (
        matrix(chosen, rows, top_k, np.int64),
        matrix(weights, rows, top_k, np.float32),
    )
    scores = np.empty(experts, np.float32)
    for row in range(rows):
        for expert in range(experts):
            product = dot1(values, matrix_rows[expert], row)
            scores[expert] = _root(product) if softplus else _sigmoid(product)
        _choose(scores, vector(bias, experts, np.float32), results[row], shares[row], scale)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scale: float,
    scoring: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """As `reference.route`, every operand float32."""
    rows, hidden = x.shape
    x, weight = x.contiguous(), weight.contiguous()
    chosen = torch.empty((rows, top_k), dtype=torch.int64)
    weights = torch.empty((rows, top_k))
    _run(
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        chosen.data_ptr(),
        weights.data_ptr(),
        rows,
        hidden,
        weight.shape[0],
        top_k,
        int(scoring == "sqrt_softplus"),
        scale,
    )
    return chosen, weights

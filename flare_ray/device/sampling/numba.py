"""The nucleus on CPU: one pass over a row's probabilities per digit, and one to apply it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from flare_ray.device.ops.numba import inner_ordered, kernel, matrix, vector

_DIGIT_BITS = 10
_BINS = 1 << _DIGIT_BITS


@inner_ordered
def _boundary(value, bit, mass, top_p):
    """(bit pattern of the smallest kept probability, mass above it, goal)."""
    goal, above, prefix = 0.0, 0.0, 0
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        mass[:] = 0.0
        for i in range(value.shape[0]):
            if bit[i] >> (shift + _DIGIT_BITS) == prefix:
                mass[(bit[i] >> shift) & (_BINS - 1)] += value[i]
        if shift == 2 * _DIGIT_BITS:
            goal = np.float64(top_p) * mass.sum()
        digit = _BINS - 1
        while digit > 0 and above + mass[digit] < goal:
            above += mass[digit]
            digit -= 1
        prefix = (prefix << _DIGIT_BITS) | digit
    return prefix, above, goal


@kernel("iiiiii", ordered=True)
def _filter(probs, top_p, min_p, rows, vocabulary, lanes):
    """Rows of `probs` [rows, vocabulary], rows // lanes of them per lane, become filtered."""
    values = matrix(probs, rows, vocabulary, np.float32)
    bits = matrix(probs, rows, vocabulary, np.int32)
    top, low = vector(top_p, lanes, np.float32), vector(min_p, lanes, np.float32)
    mass = np.empty(_BINS, np.float64)
    for row in range(rows):
        lane = row // (rows // lanes)
        value, bit = values[row], bits[row]
        boundary, above, goal = 0, 0.0, 1.0
        if top[lane] < 1.0:
            boundary, above, goal = _boundary(value, bit, mass, top[lane])
        floor = np.float32(0.0)
        if low[lane] > 0.0:
            floor = low[lane] * value.max()
        kept = 0.0
        for i in range(vocabulary):
            if bit[i] == boundary and boundary > 0:
                # Equal probabilities enter in order of id until the mass is reached.
                if above >= goal:
                    value[i] = 0.0
                above += value[i]
            if bit[i] < boundary or value[i] < floor:
                value[i] = 0.0
            kept += value[i]
        for i in range(vocabulary):
            value[i] = np.float32(value[i] / kept)


def filter_rows(probs: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep each row's nucleus and what reaches its min-p floor, renormalised.

    Args:
        probs: [B, W, V] float32, each in [0, 1], contiguous; overwritten.
        top_p: [B] float32 in (0, 1], 1 = off.
        min_p: [B] float32 in [0, 1), 0 = off.
    Returns:
        `probs`.
    """
    lanes, width, vocabulary = probs.shape
    top_p, min_p = top_p.contiguous(), min_p.contiguous()
    _filter(probs.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), lanes * width, vocabulary, lanes)
    return probs

"""The gated addition on CPU, a row at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, float_rows, inner, kernel, matrix


@inner
def agreement(stream, key, factor, eps):
    """Cosine-like product of two lines [H], times the root of their length."""
    product, first, second = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(stream.shape[0]):
        product += stream[i] * factor[i] * key[i]
        first += stream[i] * stream[i]
        second += key[i] * key[i]
    size = np.float32(stream.shape[0])
    norms = np.sqrt(first / size + eps) * np.sqrt(second / size + eps)
    return product / (norms * np.sqrt(size))


@kernel("iiiiiiiff")
def _run(streams, key_value, factor, out, rows, count, hidden, eps, least):
    olds = cube(streams, rows, count, hidden, np.float32)
    news = cube(out, rows, count, hidden, np.float32)
    joint = cube(key_value, rows, count + 1, hidden, np.float32)
    factors = matrix(factor, count, hidden, np.float32)
    for row in range(rows):
        value = joint[row, count]
        for c in range(count):
            agreed = agreement(olds[row, c], joint[row, c], factors[c], np.float32(eps))
            root = np.sqrt(max(abs(agreed), np.float32(least)))
            signed = np.copysign(root, agreed)
            gate = np.float32(1.0) / (np.float32(1.0) + np.exp(-signed))
            for i in range(hidden):
                news[row, c, i] = olds[row, c, i] + gate * value[i]


def gated_write(
    streams: Tensor, key_value: Tensor, factor: Tensor, *, eps: float, least: float
) -> Tensor:
    """As `api.gated_write`, every operand float32."""
    rows, count, hidden = streams.shape
    streams, factor = streams.contiguous(), factor.contiguous()
    key_value = float_rows(key_value, (count + 1) * hidden)
    out = torch.empty_like(streams)
    _run(
        streams.data_ptr(),
        key_value.data_ptr(),
        factor.data_ptr(),
        out.data_ptr(),
        rows,
        count,
        hidden,
        eps,
        least,
    )
    return out

"""Products of few rows on CPU: the matrix is read once, in bfloat16 where that loses nothing.

A round multiplies a handful of rows by every matrix of the model, so its time is the time to read
them. Checkpoints store bfloat16; widened to float32 they take twice the traffic for the same
numbers. Here a matrix whose every element is a bfloat16 stays one, is widened in registers and
multiplied in float32: the arithmetic of a float32 product, at half the bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.compiled import inner, kernel, matrix, widen


@inner
def dot1(x, weight, a):
    """Product of row a and one matrix row."""
    s = np.float32(0.0)
    for i in range(weight.shape[0]):
        s += x[a, i] * widen(weight[i])
    return s


@inner
def dot2(x, weight, a):
    """Products of rows a and a + 1."""
    s, t = np.float32(0.0), np.float32(0.0)
    for i in range(weight.shape[0]):
        w = widen(weight[i])
        s += x[a, i] * w
        t += x[a + 1, i] * w
    return s, t


@inner
def dot4(x, weight, a):
    """Products of rows a to a + 3."""
    s, t = np.float32(0.0), np.float32(0.0)
    u, v = np.float32(0.0), np.float32(0.0)
    for i in range(weight.shape[0]):
        w = widen(weight[i])
        s += x[a, i] * w
        t += x[a + 1, i] * w
        u += x[a + 2, i] * w
        v += x[a + 3, i] * w
    return s, t, u, v


@inner
def products(x, weight, out):
    """out [R, n] = x [R, k] times weight [n, k] transposed."""
    rows = x.shape[0]
    for j in range(weight.shape[0]):
        line = weight[j]
        a = 0
        while a + 4 <= rows:
            out[a, j], out[a + 1, j], out[a + 2, j], out[a + 3, j] = dot4(x, line, a)
            a += 4
        if a + 2 <= rows:
            out[a, j], out[a + 1, j] = dot2(x, line, a)
            a += 2
        if a < rows:
            out[a, j] = dot1(x, line, a)


@kernel("iiiiiii")
def _multiply(x, weight, out, rows, columns, depth, narrow):
    values, results = matrix(x, rows, depth, np.float32), matrix(out, rows, columns, np.float32)
    if narrow:
        products(values, matrix(weight, columns, depth, np.uint16), results)
    else:
        products(values, matrix(weight, columns, depth, np.float32), results)


def stored(weight: Tensor) -> Tensor:
    """[out, in] float32 -> bfloat16 if that is exact, else float32; contiguous."""
    narrow = weight.to(torch.bfloat16)
    exact = torch.equal(narrow.to(torch.float32), weight)
    return (narrow if exact else weight).contiguous()


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """[R, in] float32 and `stored` [out, in] -> [R, out] float32."""
    x = x.contiguous()
    columns, depth = weight.shape
    rows = x.shape[0]
    out = torch.empty((rows, columns))
    narrow = weight.dtype == torch.bfloat16
    _multiply(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns, depth, narrow)
    return out

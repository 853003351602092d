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

from flare_ray.device.ops.numba import float_rows, inner, kernel, matrix, widen


@inner
def dot1(x, weight, a):
    """Product of row a and one matrix row."""
    s = np.float32(0.0)
    for i in range(weight.shape[0]):
        s += x[a, i] * widen(weight[i])
    return s


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
def dot2(x, weight, a):
    """Products of rows a and a + 1."""
    s, t = np.float32(0.0), np.float32(0.0)
    for i in range(weight.shape[0]):
        w = widen(weight[i])
        s += x[a, i] * w
        t += x[a + 1, i] * w
    return s, t


@inner
def pair3(x, first, second, a):
    """Products of rows a to a + 2 with two matrix rows: six sums for five loads."""
    s, t, u = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    p, q, r = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(first.shape[0]):
        w, z = widen(first[i]), widen(second[i])
        s += x[a, i] * w
        t += x[a + 1, i] * w
        u += x[a + 2, i] * w
        p += x[a, i] * z
        q += x[a + 1, i] * z
        r += x[a + 2, i] * z
    return s, t, u, p, q, r


@inner
def column(x, weight, out, j, first):
    """Column j of the rows from `first` on, at most two."""
    if x.shape[0] - first == 2:
        out[first, j], out[first + 1, j] = dot2(x, weight[j], first)
    else:
        out[first, j] = dot1(x, weight[j], first)


@inner
def blocks(x, weight, out):
    """Blocks of three rows by pairs of columns, then the one or two rows left."""
    rows, columns = x.shape[0], weight.shape[0]
    blocked = rows - rows % 3
    even = columns - columns % 2
    for j in range(0, even, 2):
        k = j + 1
        for a in range(0, blocked, 3):
            s, t, u, p, q, r = pair3(x, weight[j], weight[k], a)
            out[a, j], out[a + 1, j], out[a + 2, j] = s, t, u
            out[a, k], out[a + 1, k], out[a + 2, k] = p, q, r
        if blocked < rows:
            column(x, weight, out, j, blocked)
            column(x, weight, out, k, blocked)
    for j in range(even, columns):
        for a in range(rows):
            out[a, j] = dot1(x, weight[j], a)


@inner
def products(x, weight, out):
    """out [R, n] = x [R, k] times weight [n, k] transposed.

    A loop of its own for each small count: the compiler schedules a lone dot product twice as well
    as one among alternatives.
    """
    rows = x.shape[0]
    if rows == 1:
        for j in range(weight.shape[0]):
            out[0, j] = dot1(x, weight[j], 0)
    elif rows == 2:
        for j in range(weight.shape[0]):
            out[0, j], out[1, j] = dot2(x, weight[j], 0)
    elif rows == 4:
        for j in range(weight.shape[0]):
            out[0, j], out[1, j], out[2, j], out[3, j] = dot4(x, weight[j], 0)
    else:
        blocks(x, weight, out)


@kernel("iiiiiii")
def _multiply(x, weight, out, rows, columns, depth, narrow):
    values, results = matrix(x, rows, depth, np.float32), matrix(out, rows, columns, np.float32)
    if narrow:
        products(values, matrix(weight, columns, depth, np.uint16), results)
    else:
        products(values, matrix(weight, columns, depth, np.float32), results)


def stored(*weights: Tensor) -> tuple[Tensor, ...]:
    """Float32 matrices -> all in bfloat16 if that is exact, else as they are; contiguous."""
    narrow = tuple(weight.to(torch.bfloat16) for weight in weights)
    exact = all(torch.equal(n.to(torch.float32), w) for n, w in zip(narrow, weights, strict=True))
    return tuple(weight.contiguous() for weight in (narrow if exact else weights))


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """[R, in] float32 and `stored` [out, in] -> [R, out] float32."""
    columns, depth = weight.shape
    x = float_rows(x, depth)
    rows = x.shape[0]
    out = torch.empty((rows, columns))
    narrow = weight.dtype == torch.bfloat16
    _multiply(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns, depth, narrow)
    return out

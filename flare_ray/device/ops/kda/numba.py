"""A round's rows on CPU, one head at a time: the state stays in the core's cache between rows.

The definition of `reference.delta_rule`, row by row: two passes over a head's [D, D] state, the
second of which also writes it where the row's state is kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.kda.reference import L2_EPS
from flare_ray.device.ops.numba import cube, inner, kernel, matrix, vector


@inner
def step(state, query, key, value, decay, beta, delta, out, kept):
    """One row: state [D, D] is advanced and copied to `kept`; delta [D] is scratch."""
    dim = key.shape[0]
    length_q, length_k = np.float32(0.0), np.float32(0.0)
    for i in range(dim):
        length_q += query[i] * query[i]
        length_k += key[i] * key[i]
    scale_q = np.float32(1.0 / math.sqrt((length_q + L2_EPS) * dim))
    scale_k = np.float32(1.0 / math.sqrt(length_k + L2_EPS))
    for j in range(dim):
        delta[j] = np.float32(0.0)
        out[j] = np.float32(0.0)
    for i in range(dim):
        k, fade = key[i] * scale_k, decay[i]
        for j in range(dim):
            faded = state[i, j] * fade
            state[i, j] = faded
            delta[j] += k * faded
    for j in range(dim):
        delta[j] = (value[j] - delta[j]) * beta
    for i in range(dim):
        k, q = key[i] * scale_k, query[i] * scale_q
        for j in range(dim):
            new = state[i, j] + k * delta[j]
            state[i, j] = new
            kept[i, j] = new
            out[j] += q * new


@kernel("iiiiiiiiiiii")
def _run(qkv, decay, beta, saved, read, write, out, lanes, width, heads, dim, rows):
    inputs = cube(qkv, lanes * width, 3 * heads, dim, np.float32)
    decays = cube(decay, lanes * width, heads, dim, np.float32)
    betas = matrix(beta, lanes * width, heads, np.float32)
    states = cube(saved, rows * heads, dim, dim, np.float32)
    outputs = cube(out, lanes * width, heads, dim, np.float32)
    first, place = vector(read, lanes, np.int64), vector(write, lanes * width, np.int64)
    state = np.empty((dim, dim), np.float32)
    delta = np.empty(dim, np.float32)
    for lane in range(lanes):
        for head in range(heads):
            # A copy: the row read may be one of those written.
            state[:] = states[first[lane] * heads + head]
            for row in range(lane * width, (lane + 1) * width):
                step(
                    state,
                    inputs[row, head],
                    inputs[row, heads + head],
                    inputs[row, 2 * heads + head],
                    decays[row, head],
                    betas[row, head],
                    delta,
                    outputs[row, head],
                    states[place[row] * heads + head],
                )


def run(
    qkv: Tensor, decay: Tensor, beta: Tensor, *, saved: Tensor, read: Tensor, write: Tensor
) -> Tensor:
    """As `reference.delta_rule`, but writes each row's state and returns the outputs only.

    Args:
        qkv: [B, T, 3, H, D] float32, before normalisation.
        decay: [B, T, H, D] float32, factors in (0, 1].
        beta: [B, T, H] float32.
        saved: [M, H, D, D] float32, contiguous, written in place.
        read: [B] int64 rows of `saved`.
        write: [B * T] int64 rows of `saved`.
    """
    lanes, width, _, heads, dim = qkv.shape
    qkv, decay, beta = qkv.contiguous(), decay.contiguous(), beta.contiguous()
    read, write = read.contiguous(), write.contiguous()
    out = torch.empty((lanes, width, heads, dim))
    _run(
        qkv.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        saved.data_ptr(),
        read.data_ptr(),
        write.data_ptr(),
        out.data_ptr(),
        lanes,
        width,
        heads,
        dim,
        saved.shape[0],
    )
    return out

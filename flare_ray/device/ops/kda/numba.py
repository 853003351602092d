"""The delta rule on CPU, one head at a time: the state stays in the core's cache between rows.

The definition of `reference.delta_rule`, row by row: two passes over a head's [D, D] state. A round
keeps the state after each row, a prefill the last one; both compute each row alike, so that a
prompt's chunking changes no bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.kda.reference import L2_EPS
from flare_ray.device.ops.numba import cube, inner, kernel, matrix, vector


@inner
def step(state, row, decay, beta, delta, out, kept):
    """Advance state [D, D] by one row [3, D]: its query, key and value; delta [D] is scratch. The
    new state goes to `kept` too, which must not be `state`: where they may overlap, the compiled
    loop is scalar and takes four times as long."""
    query, key, value = row
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


@kernel("iiiiiiiiiiiii")
def _run(qkv, decay, beta, saved, read, write, out, lanes, width, heads, dim, rows, keeps_all):
    inputs = cube(qkv, lanes * width, 3 * heads, dim, np.float32)
    decays = cube(decay, lanes * width, heads, dim, np.float32)
    betas = matrix(beta, lanes * width, heads, np.float32)
    states = cube(saved, rows * heads, dim, dim, np.float32)
    outputs = cube(out, lanes * width, heads, dim, np.float32)
    first = vector(read, lanes, np.int64)
    place = vector(write, lanes * width if keeps_all else lanes, np.int64)
    state, unused = np.empty((dim, dim), np.float32), np.empty((dim, dim), np.float32)
    delta = np.empty(dim, np.float32)
    for lane in range(lanes):
        for head in range(heads):
            # A copy: the row read may be one of those written.
            state[:] = states[first[lane] * heads + head]
            for t in range(width):
                row = lane * width + t
                line = inputs[row]
                parts = (line[head], line[heads + head], line[2 * heads + head])
                kept = unused
                if keeps_all:
                    kept = states[place[row] * heads + head]
                step(
                    state,
                    parts,
                    decays[row, head],
                    betas[row, head],
                    delta,
                    outputs[row, head],
                    kept,
                )
            if not keeps_all:
                states[place[lane] * heads + head] = state


def run(
    qkv: Tensor, decay: Tensor, beta: Tensor, *, saved: Tensor, read: Tensor, write: Tensor
) -> Tensor:
    """As `reference.delta_rule`, but writes states and returns the outputs only.

    Args:
        qkv: [B, T, 3, H, D] float32, before normalisation.
        decay: [B, T, H, D] float32, factors in (0, 1]; 1 where a row leaves the state alone.
        beta: [B, T, H] float32, 0 there.
        saved: [M, H, D, D] float32, contiguous, written in place.
        read: [B] int64 rows of `saved`.
        write: rows of `saved`, int64: [B * T], one for every row's state, or [B], for the last's.
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
        write.shape[0] != lanes or width == 1,
    )
    return out

"""Stream mixing on CPU: a site's coefficients and its Sinkhorn passes in registers and cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, dot1, inner, kernel, matrix, vector


class Site(NamedTuple):
    """projection [(2 + n) n, n H] and base [(2 + n) n] float32, scales folded in; eps of sums and
    of pre; norm_eps of the streams; iterations: column passes."""

    projection: Tensor
    base: Tensor
    iterations: int
    eps: float
    norm_eps: float


@inner
def divide_columns(mix, eps):
    """Each column of [n, n] by its sum."""
    n = mix.shape[0]
    for j in range(n):
        total = eps
        for i in range(n):
            total += mix[i, j]
        scale = np.float32(1.0) / total
        for i in range(n):
            mix[i, j] *= scale


@inner
def start(logits, mix, eps):
    """Softmax of each row of logits [n * n], plus eps."""
    n = mix.shape[0]
    for i in range(n):
        highest = np.float32(-np.inf)
        for j in range(n):
            highest = max(highest, logits[i * n + j])
        total = np.float32(0.0)
        for j in range(n):
            mix[i, j] = np.exp(logits[i * n + j] - highest)
            total += mix[i, j]
        for j in range(n):
            mix[i, j] = mix[i, j] / total + eps


@kernel("iiiiiiiiiiff")
def _mix_in(
    streams, projection, base, block, post, mix, rows, n, hidden, iterations, eps, norm_eps
):
    flat = matrix(streams, rows, n * hidden, np.float32)
    weights = matrix(projection, (2 + n) * n, n * hidden, np.float32)
    bias = vector(base, (2 + n) * n, np.float32)
    blocks, posts = matrix(block, rows, hidden, np.float32), matrix(post, rows, n, np.float32)
    mixes = cube(mix, rows, n, n, np.float32)
    raw = np.empty((2 + n) * n, np.float32)
    small = np.float32(eps)
    for row in range(rows):
        line = flat[row]
        total = np.float32(0.0)
        for i in range(n * hidden):
            total += line[i] * line[i]
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / (n * hidden) + norm_eps))
        for c in range((2 + n) * n):
            raw[c] = dot1(flat, weights[c], row) * scale + bias[c]
        for c in range(n):
            posts[row, c] = np.float32(2.0) / (np.float32(1.0) + np.exp(-raw[n + c]))
        blocks[row] = np.float32(0.0)
        for c in range(n):
            pre = np.float32(1.0) / (np.float32(1.0) + np.exp(-raw[c])) + small
            for i in range(hidden):
                blocks[row, i] += pre * line[c * hidden + i]
        start(raw[2 * n :], mixes[row], small)
        divide_columns(mixes[row], small)
        for _ in range(iterations - 1):
            divide_columns(mixes[row].T, small)
            divide_columns(mixes[row], small)


@kernel("iiiiiiii")
def _mix_out(block, streams, post, mix, out, rows, n, hidden):
    blocks, posts = matrix(block, rows, hidden, np.float32), matrix(post, rows, n, np.float32)
    olds, news = cube(streams, rows, n, hidden, np.float32), cube(out, rows, n, hidden, np.float32)
    mixes = cube(mix, rows, n, n, np.float32)
    for row in range(rows):
        for j in range(n):
            for i in range(hidden):
                news[row, j, i] = posts[row, j] * blocks[row, i]
            for source in range(n):
                share = mixes[row, source, j]
                for i in range(hidden):
                    news[row, j, i] += share * olds[row, source, i]


def mix_in(streams: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [R, n, H] float32 -> (block input [R, H], post [R, n], mix [R, n, n])."""
    streams = streams.contiguous()
    rows, n, hidden = streams.shape
    block, post = torch.empty((rows, hidden)), torch.empty((rows, n))
    mix = torch.empty((rows, n, n))
    _mix_in(
        streams.data_ptr(),
        site.projection.data_ptr(),
        site.base.data_ptr(),
        block.data_ptr(),
        post.data_ptr(),
        mix.data_ptr(),
        rows,
        n,
        hidden,
        site.iterations,
        site.eps,
        site.norm_eps,
    )
    return block, post, mix


def mix_out(block: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """As `api.mix_out`, every operand float32."""
    block, streams = block.contiguous(), streams.contiguous()
    rows, n, hidden = streams.shape
    out = torch.empty_like(streams)
    _mix_out(
        block.data_ptr(),
        streams.data_ptr(),
        post.data_ptr(),
        mix.data_ptr(),
        out.data_ptr(),
        rows,
        n,
        hidden,
    )
    return out

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


@inner
def coefficients(flat, row, weights, bias, raw, norm_eps):
    """raw [(2 + n) n] of one row's streams."""
    line = flat[row]
    total = np.float32(0.0)
    for i in range(line.shape[0]):
        total += line[i] * line[i]
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / line.shape[0] + norm_eps))
    for c in range(raw.shape[0]):
        raw[c] = dot1(flat, weights[c], row) * scale + bias[c]


@inner
def sinkhorn(logits, mix, small, iterations):
    """Softmax and alternate passes over mix [n, n]."""
    start(logits, mix, small)
    divide_columns(mix, small)
    for _ in range(iterations - 1):
        divide_columns(mix.T, small)
        divide_columns(mix, small)


@kernel("iiiiiiiiiiiiiff")
def _mix(
    streams,
    projection,
    base,
    before,
    block,
    pre,
    post,
    mix,
    rows,
    n,
    hidden,
    iterations,
    late,
    eps,
    norm_eps,
):
    flat = matrix(streams, rows, n * hidden, np.float32)
    weights = matrix(projection, (2 + n) * n, n * hidden, np.float32)
    bias = vector(base, (2 + n) * n, np.float32)
    blocks, posts = matrix(block, rows, hidden, np.float32), matrix(post, rows, n, np.float32)
    pres = matrix(pre, rows, n, np.float32)
    shares = matrix(before, rows, n, np.float32)
    mixes = cube(mix, rows, n, n, np.float32)
    raw = np.empty((2 + n) * n, np.float32)
    small = np.float32(eps)
    for row in range(rows):
        coefficients(flat, row, weights, bias, raw, norm_eps)
        line = flat[row]
        for c in range(n):
            pres[row, c] = np.float32(1.0) / (np.float32(1.0) + np.exp(-raw[c])) + small
            posts[row, c] = np.float32(2.0) / (np.float32(1.0) + np.exp(-raw[n + c]))
        blocks[row] = np.float32(0.0)
        for c in range(n):
            share = shares[row, c] if late else pres[row, c]
            for i in range(hidden):
                blocks[row, i] += share * line[c * hidden + i]
        sinkhorn(raw[2 * n :], mixes[row], small, iterations)


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


@kernel("iiiiii")
def _collapse(streams, pre, out, rows, n, hidden):
    values, results = (
        cube(streams, rows, n, hidden, np.float32),
        matrix(out, rows, hidden, np.float32),
    )
    shares = matrix(pre, rows, n, np.float32)
    for row in range(rows):
        results[row] = np.float32(0.0)
        for c in range(n):
            for i in range(hidden):
                results[row, i] += shares[row, c] * values[row, c, i]


def mix_in(streams: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [R, n, H] float32 -> (block input [R, H], post [R, n], mix [R, n, n])."""
    block, _pre, post, mix = _sites(streams, None, site)
    return block, post, mix


def mix_late(streams: Tensor, before: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mix_in` with the coefficients `before` [R, n]: (block input, pre [R, n], post, mix)."""
    return _sites(streams, before.contiguous(), site)


def _sites(
    streams: Tensor, before: Tensor | None, site: Site
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = streams.contiguous()
    rows, n, hidden = streams.shape
    block, pre, post = torch.empty((rows, hidden)), torch.empty((rows, n)), torch.empty((rows, n))
    mix = torch.empty((rows, n, n))
    _mix(
        streams.data_ptr(),
        site.projection.data_ptr(),
        site.base.data_ptr(),
        (pre if before is None else before).data_ptr(),
        block.data_ptr(),
        pre.data_ptr(),
        post.data_ptr(),
        mix.data_ptr(),
        rows,
        n,
        hidden,
        site.iterations,
        int(before is not None),
        site.eps,
        site.norm_eps,
    )
    return block, pre, post, mix


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


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """As `api.collapse`, streams float32."""
    streams, pre = streams.contiguous(), pre.contiguous()
    rows, n, hidden = streams.shape
    out = torch.empty((rows, hidden))
    _collapse(streams.data_ptr(), pre.data_ptr(), out.data_ptr(), rows, n, hidden)
    return out

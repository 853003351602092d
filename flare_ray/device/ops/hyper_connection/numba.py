"""Stream mixing on CPU: a site's coefficients and its Sinkhorn passes in registers and cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from flare_ray.device.ops.numba import aligned, cube, dot1, inner, kernel, matrix, vector
from flare_ray.device.ops.vectors.numba import (
    DOTS,
    FLOAT,
    LANES,
    dots,
    exponential,
    load,
    loop,
    pointer,
    sigmoid,
    spread,
    store,
)


class Site(NamedTuple):
    """projection [(2 + n) n, n H] and base [(2 + n) n] float32, scales folded in; eps of sums and
    of pre; norm_eps of the streams; iterations: column passes."""

    projection: Tensor
    base: Tensor
    iterations: int
    eps: float
    norm_eps: float


@intrinsic
def _divide(_context, lines, stride, count, eps):
    """`count` vectors by their sum plus eps, place by place; the address of the first, floats
    between them."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lines, stride, count, eps = args
        values = pointer(builder, lines)

        def add(number: Any, sums: list[Any]) -> list[Any]:
            return [builder.fadd(sums[0], load(builder, values, builder.mul(number, stride)))]

        (total,) = loop(builder, count, [spread(builder, eps)], add)
        share = builder.fdiv(spread(builder, ir.Constant(FLOAT, 1.0)), total)

        def scale(number: Any, _nothing: list[Any]) -> list[Any]:
            place = builder.mul(number, stride)
            scaled = builder.fmul(load(builder, values, place), share)
            store(builder, scaled, values, place)
            return []

        loop(builder, count, [], scale)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit


_divided: Any = _divide


@inner
def start(lines, n, eps):
    """Softmax of each row of logits [n * n, LANES] in place, plus eps."""
    highest, totals = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for i in range(n):
        for lane in range(LANES):
            highest[lane], totals[lane] = lines[i * n, lane], np.float32(0.0)
        for j in range(1, n):
            for lane in range(LANES):
                highest[lane] = max(highest[lane], lines[i * n + j, lane])
        for j in range(n):
            line = lines[i * n + j]
            for lane in range(LANES):
                line[lane] = exponential(line[lane] - highest[lane])
                totals[lane] += line[lane]
        for j in range(n):
            line = lines[i * n + j]
            for lane in range(LANES):
                line[lane] = line[lane] / totals[lane] + eps


@inner
def coefficients(flat, row, weights, bias, raw, norm_eps):
    """raw [(2 + n) n] of one row's streams."""
    line = flat[row]
    total = np.float32(0.0)
    for i in range(line.shape[0]):
        total += line[i] * line[i]
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / line.shape[0] + norm_eps))
    count, dim = weights.shape
    together = count // DOTS * DOTS if dim % LANES == 0 else 0
    for c in range(0, together, DOTS):
        dots(
            np.int64(line.ctypes.data),
            np.int64(weights.ctypes.data) + c * dim * 4,
            np.int64(raw.ctypes.data) + c * 4,
            dim,
            dim,
        )
    for c in range(together, count):
        raw[c] = dot1(flat, weights[c], row)
    for c in range(count):
        raw[c] = raw[c] * scale + bias[c]


@inner
def sinkhorn(lines, n, small, iterations):
    """Softmax and alternate passes over mixes lines [n * n, LANES], a row of streams a lane."""
    start(lines, n, small)
    first = np.int64(lines.ctypes.data)
    for passes in range(iterations):
        for i in range(n if passes else 0):
            _divided(first + i * n * LANES * 4, LANES, n, small)
        for j in range(n):
            _divided(first + j * LANES * 4, n * LANES, n, small)


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
    raw, lines = np.empty((2 + n) * n, np.float32), aligned((2 + n) * n, LANES)
    small = np.float32(eps)
    # As many rows as a vector has places: the passes divide side by side. Places left over at the
    # end go through all of it with what stands there.
    for first in range(0, rows, LANES):
        count = min(LANES, rows - first)
        for lane in range(count):
            coefficients(flat, first + lane, weights, bias, raw, norm_eps)
            lines[:, lane] = raw
        for c in range(2 * n):
            line, floor = lines[c], small if c < n else np.float32(0.0)
            factor = np.float32(1.0) if c < n else np.float32(2.0)
            for lane in range(LANES):
                line[lane] = factor * sigmoid(line[lane]) + floor
        sinkhorn(lines[2 * n :], n, small, iterations)
        for lane in range(count):
            row = first + lane
            for c in range(n):
                pres[row, c], posts[row, c] = lines[c, lane], lines[n + c, lane]
            for i in range(n):
                for j in range(n):
                    mixes[row, i, j] = lines[(2 + i) * n + j, lane]
            blocks[row] = np.float32(0.0)
            for c in range(n):
                share = shares[row, c] if late else pres[row, c]
                for i in range(hidden):
                    blocks[row, i] += share * flat[row, c * hidden + i]


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

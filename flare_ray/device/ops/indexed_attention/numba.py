"""Attention over latents on CPU: read where they lie, hidden ones not at all.

Up to sixteen rows of a lane, all their heads, run together over the positions that any of them
sees:

1. scores: each latent is multiplied by four queries at a time.
2. weights: a softmax down the positions, queries side by side; what a row does not see weighs 0.
3. results: some channels of four queries at a time, position by position.

All sums stay in registers and run in an order of their own, so a row's bits do not depend on the
rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from flare_ray.device.ops.numba import inner, kernel, matrix, vector
from flare_ray.device.ops.vectors.numba import (
    DOTS,
    HELD,
    INT64,
    LANES,
    added_product,
    constant,
    dots,
    exponential,
    load,
    loop,
    pointer,
    spread,
    store,
    zeros,
)

QUERIES = DOTS
"""Queries that run together; heads come in such groups."""
ROWS = 16
"""Rows of a block: their scores stay in the second cache beside the latents."""
_PARTS = 4 if 4 * QUERIES + 2 <= HELD else 1
CHANNELS = LANES * _PARTS
"""Channels of a latent that are summed together."""


def _address(builder: ir.IRBuilder, addresses: Any, number: Any) -> Any:
    """The pointer at a place of a list of addresses."""
    return pointer(builder, builder.load(builder.gep(addresses, [number])))


@intrinsic
def _sum(_context, weights, addresses, out, count, strides):
    """out [QUERIES, CHANNELS] = sums of latents, weighed; addresses of weights [count, QUERIES], of
    `count` addresses of the latents' first channels, of out; floats between lines of weights, the
    channels to pass over, floats between lines of out."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, addresses, out, count, strides = args
        weight_stride, first, out_stride = (builder.extract_value(strides, n) for n in range(3))
        shares, results = pointer(builder, weights), pointer(builder, out)
        listed = pointer(builder, addresses, INT64)

        def add_line(number: Any, sums: list[Any]) -> list[Any]:
            line = builder.gep(_address(builder, listed, number), [first])
            values = [load(builder, line, constant(LANES * part)) for part in range(_PARTS)]
            start = builder.mul(number, weight_stride)
            following = []
            for query in range(QUERIES):
                place = builder.gep(shares, [builder.add(start, constant(query))])
                share = spread(builder, builder.load(place))
                for part, value in enumerate(values):
                    held = sums[query * _PARTS + part]
                    following.append(added_product(builder, held, share, value))
            return following

        sums = loop(builder, count, [zeros()] * (QUERIES * _PARTS), add_line)
        for query in range(QUERIES):
            line = builder.mul(out_stride, constant(query))
            for part in range(_PARTS):
                place = builder.add(line, constant(LANES * part))
                store(builder, sums[query * _PARTS + part], results, place)
        return context.get_dummy_value()

    strides_type = types.UniTuple(types.int64, 3)
    return types.void(types.int64, types.int64, types.int64, types.int64, strides_type), emit


_weighed: Any = _sum


@inner
def _scores(queries, addresses, count, scores):
    """scores [count, Q and more] of queries [Q, D] and `count` latents. A latent passes from the
    second cache to the four queries in the first."""
    total, dim = queries.shape
    first, target = np.int64(queries.ctypes.data), np.int64(scores.ctypes.data)
    for query in range(0, total, QUERIES):
        others = first + query * dim * 4
        for n in range(count):
            dots(addresses[n], others, target + (n * scores.shape[1] + query) * 4, dim, dim)


@inner
def _weigh(scores, bias, count, heads, scale, highest, totals):
    """scores [count, Q and more] become weights that sum to 1 down the positions, for those that
    bias [Q / heads, N] shows, 0 elsewhere; highest, totals [Q and more] are scratch. What stands
    beyond Q is anything, and stays so: whole vectors are faster than a rest."""
    total = scores.shape[1]
    highest[:], totals[:] = np.float32(-np.inf), np.float32(0.0)
    for n in range(count):
        line = scores[n]
        for query in range(total):
            line[query] *= scale
        for row in range(bias.shape[0]):
            if bias[row, n] != 0.0:
                for query in range(row * heads, (row + 1) * heads):
                    line[query] = np.float32(-np.inf)
        for query in range(total):
            highest[query] = max(highest[query], line[query])
    for n in range(count):
        line = scores[n]
        for query in range(total):
            value = exponential(line[query] - highest[query])
            line[query] = np.float32(0.0) if line[query] == -np.inf else value
            totals[query] += line[query]
    for query in range(total):
        # A row that sees nothing attends to nothing.
        sees = totals[query] > 0.0
        totals[query] = np.float32(1.0) / totals[query] if sees else np.float32(0.0)
    for n in range(count):
        line = scores[n]
        for query in range(total):
            line[query] *= totals[query]


@inner
def _results(scores, addresses, count, total, dim, out):
    """out [Q, dim] at an address = weights scores [count, Q and more] times latents."""
    weights, listed = np.int64(scores.ctypes.data), np.int64(addresses.ctypes.data)
    for query in range(0, total, QUERIES):
        shares = weights + query * 4
        for first in range(0, dim, CHANNELS):
            target = out + (query * dim + first) * 4
            _weighed(shares, listed, target, count, (scores.shape[1], first, dim))


@inner
def _room(rows, heads, count):
    """Scratch of blocks of so many rows over so many latents: addresses, scores from the start of a
    cache line on, sums. It holds anything: most is not written where contexts are short."""
    columns = (rows * heads + LANES - 1) // LANES * LANES
    spare = np.empty(count * columns + LANES, np.float32)
    first = (-np.int64(spare.ctypes.data) % (LANES * 4)) // 4
    scores = spare[first : first + count * columns].reshape(count, columns)
    sums = (np.empty(columns, np.float32), np.empty(columns, np.float32))
    return np.empty(count, np.int64), scores, sums


@inner
def _attend(queries, bias, count, heads, scale, out, room):
    """One block: queries [Q, D] of rows whose latents are the first `count` addresses."""
    addresses, scores, sums = room
    total, dim = queries.shape
    if count == 0:
        matrix(out, total, dim, np.float32)[:] = np.float32(0.0)
        return
    _scores(queries, addresses, count, scores)
    _weigh(scores, bias, count, heads, scale, sums[0], sums[1])
    _results(scores, addresses, count, total, dim, out)


@kernel("iiiiiiiiiiif")
def _run(query, cache, read, bias, out, lanes, width, heads, dim, count, rows, scale):
    queries = matrix(query, lanes * width * heads, dim, np.float32)
    shown = matrix(bias, lanes * width, count, np.float32)
    places = vector(read, lanes * count, np.int64)
    room = _room(min(ROWS, width), heads, count)
    addresses = room[0]
    for lane in range(lanes):
        listed = places[lane * count : (lane + 1) * count]
        for start in range(lane * width, (lane + 1) * width, ROWS):
            end = min(start + ROWS, (lane + 1) * width)
            seen = 0
            for row in range(start, end):
                last = count
                while last > seen and shown[row, last - 1] != 0.0:
                    last -= 1
                seen = max(seen, last)
            for n in range(seen):
                addresses[n] = cache + listed[n] * dim * 4
            part, target = queries[start * heads : end * heads], out + start * heads * dim * 4
            _attend(part, shown[start:end], seen, heads, np.float32(scale), target, room)


@kernel("iiiiiiiiif")
def _run_listed(query, cache, index, out, lines, heads, dim, count, rows, scale):
    queries = matrix(query, lines * heads, dim, np.float32)
    listed = matrix(index, lines, count, np.int64)
    room = _room(1, heads, count)
    addresses, shown = room[0], np.zeros((1, count), np.float32)
    for line in range(lines):
        seen = 0
        for n in range(count):
            if listed[line, n] >= 0:
                addresses[seen] = cache + listed[line, n] * dim * 4
                seen += 1
        part, target = queries[line * heads : (line + 1) * heads], out + line * heads * dim * 4
        _attend(part, shown, seen, heads, np.float32(scale), target, room)


def fits(dim: int, heads: int) -> bool:
    """Whether the kernels take latents of so many channels, and so many heads."""
    return heads % QUERIES == 0 and dim % CHANNELS == 0


def indexed_attention(query: Tensor, cache: Tensor, index: Tensor, *, scale: float) -> Tensor:
    """As `api.indexed_attention`, float32, what `fits`."""
    lines, heads, dim = query.shape
    query, index = query.contiguous(), index.contiguous()
    out = torch.empty_like(query)
    _run_listed(
        query.data_ptr(),
        cache.data_ptr(),
        index.data_ptr(),
        out.data_ptr(),
        lines,
        heads,
        dim,
        index.shape[1],
        cache.shape[0],
        scale,
    )
    return out


def causal_attention(
    query: Tensor, cache: Tensor, read: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """As `api.causal_attention`, float32, what `fits`."""
    lanes, width, heads, dim = query.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    _run(
        query.data_ptr(),
        cache.data_ptr(),
        read.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        lanes,
        width,
        heads,
        dim,
        bias.shape[2],
        cache.shape[0],
        scale,
    )
    return out

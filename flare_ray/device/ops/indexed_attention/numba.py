"""Attention of a few queries on CPU: latents are read where they lie, hidden ones not at all."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import dot4, inner, kernel, matrix, vector


@inner
def attend(queries, cache, places, bias, scores, scale, out):
    """Groups of four queries [4 G, D] of one row over cache rows at `places` [N] where bias [N]
    shows them; scores [4, N] scratch; scale of the products; out [4 G, D]."""
    count, dim = places.shape[0], cache.shape[1]
    for first in range(0, queries.shape[0], 4):
        for n in range(count):
            if bias[n] == 0.0:
                line = cache[places[n]]
                s, t, u, v = dot4(queries, line, first)
                scores[0, n], scores[1, n] = s * scale, t * scale
                scores[2, n], scores[3, n] = u * scale, v * scale
        for a in range(4):
            highest = np.float32(-np.inf)
            for n in range(count):
                if bias[n] == 0.0:
                    highest = max(highest, scores[a, n])
            total = np.float32(0.0)
            for n in range(count):
                if bias[n] == 0.0:
                    scores[a, n] = np.exp(scores[a, n] - highest)
                    total += scores[a, n]
            # A row that sees nothing attends to nothing.
            share = np.float32(1.0) / total if total > 0.0 else np.float32(0.0)
            for n in range(count):
                scores[a, n] *= share
            out[first + a] = np.float32(0.0)
        for n in range(count):
            if bias[n] == 0.0:
                line = cache[places[n]]
                w0, w1, w2, w3 = scores[0, n], scores[1, n], scores[2, n], scores[3, n]
                for i in range(dim):
                    out[first, i] += w0 * line[i]
                    out[first + 1, i] += w1 * line[i]
                    out[first + 2, i] += w2 * line[i]
                    out[first + 3, i] += w3 * line[i]


@kernel("iiiiiiiiiiif")
def _run(query, cache, read, bias, out, lanes, width, heads, dim, count, rows, scale):
    queries = matrix(query, lanes * width * heads, dim, np.float32)
    results = matrix(out, lanes * width * heads, dim, np.float32)
    latents = matrix(cache, rows, dim, np.float32)
    shown = matrix(bias, lanes * width, count, np.float32)
    places = vector(read, lanes * count, np.int64)
    scores = np.empty((4, count), np.float32)
    for lane in range(lanes):
        for row in range(lane * width, (lane + 1) * width):
            attend(
                queries[row * heads : (row + 1) * heads],
                latents,
                places[lane * count : (lane + 1) * count],
                shown[row],
                scores,
                np.float32(scale),
                results[row * heads : (row + 1) * heads],
            )


@kernel("iiiiiiiiif")
def _run_listed(query, cache, index, out, lines, heads, dim, count, rows, scale):
    queries = matrix(query, lines * heads, dim, np.float32)
    results = matrix(out, lines * heads, dim, np.float32)
    latents = matrix(cache, rows, dim, np.float32)
    listed = matrix(index, lines, count, np.int64)
    scores, shown = np.empty((4, count), np.float32), np.empty(count, np.float32)
    for line in range(lines):
        for n in range(count):
            shown[n] = 0.0 if listed[line, n] >= 0 else -np.inf
        part = slice(line * heads, (line + 1) * heads)
        factor = np.float32(scale)
        attend(queries[part], latents, listed[line], shown, scores, factor, results[part])


def indexed_attention(query: Tensor, cache: Tensor, index: Tensor, *, scale: float) -> Tensor:
    """As `api.indexed_attention`, float32, heads a multiple of four."""
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
    """As `api.causal_attention`, float32, heads a multiple of four."""
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

"""Attention with a sink on CPU: rows are read where they lie, hidden ones not at all.

A row's visible entries are listed first, in the order given, and every sum runs over that list
alone: its bits depend neither on other rows nor on how many hidden entries stand between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import dot1, dot4, float_rows, inner, kernel, matrix, vector

if TYPE_CHECKING:
    from flare_ray.device.ops.sink_attention.api import Listed

FLOAT_BYTES = 4


@inner
def list_visible(pool, places, dim, lines, count):
    """Append the addresses of rows of `pool` at `places` [N], hidden ones left out; how many."""
    for place in places:
        if place >= 0:
            lines[count] = pool + place * dim * FLOAT_BYTES
            count += 1
    return count


@inner
def weigh(scores, sink):
    """Scores [N] to weights beside a sink's logit."""
    highest = sink
    for n in range(scores.shape[0]):
        highest = max(highest, scores[n])
    total = np.exp(sink - highest)
    for n in range(scores.shape[0]):
        scores[n] = np.exp(scores[n] - highest)
        total += scores[n]
    scale = np.float32(1.0) / total
    for n in range(scores.shape[0]):
        scores[n] *= scale


@inner
def mix(weights, lines, result):
    """result [D] = weights [N] times the rows at addresses `lines` [N], four a step."""
    dim, count = result.shape[0], lines.shape[0]
    result[:] = np.float32(0.0)
    whole = count - count % 4
    for n in range(0, whole, 4):
        a, b = vector(lines[n], dim, np.float32), vector(lines[n + 1], dim, np.float32)
        c, d = vector(lines[n + 2], dim, np.float32), vector(lines[n + 3], dim, np.float32)
        for i in range(dim):
            added = weights[n] * a[i] + weights[n + 1] * b[i]
            result[i] += added + (weights[n + 2] * c[i] + weights[n + 3] * d[i])
    for n in range(whole, count):
        line = vector(lines[n], dim, np.float32)
        for i in range(dim):
            result[i] += weights[n] * line[i]


@inner
def attend(queries, lines, sink, scale, scores, out):
    """Queries [H, D] of one row over the rows at addresses `lines` [N]; scores [4, >= N] scratch;
    out [H, D]."""
    heads, dim = queries.shape
    count = lines.shape[0]
    for first in range(0, heads, 4):
        some = min(4, heads - first)
        for n in range(count):
            line = vector(lines[n], dim, np.float32)
            if some == 4:
                s, t, u, v = dot4(queries, line, first)
                scores[0, n], scores[1, n] = s * scale, t * scale
                scores[2, n], scores[3, n] = u * scale, v * scale
            else:
                for a in range(some):
                    scores[a, n] = dot1(queries, line, first + a) * scale
        for a in range(some):
            weights = scores[a, :count]
            weigh(weights, sink[first + a])
            mix(weights, lines, out[first + a])


@kernel("iiiiiiiiiiiif")
def _run(query, first, listed, second, more, sink, out, rows, heads, dim, counts, others, scale):
    queries = matrix(query, rows * heads, dim, np.float32)
    results = matrix(out, rows * heads, dim, np.float32)
    near, far = matrix(listed, rows, counts, np.int64), matrix(more, rows, others, np.int64)
    lines, scores = np.empty(counts + others, np.int64), np.empty((4, counts + others), np.float32)
    for row in range(rows):
        count = list_visible(first, near[row], dim, lines, 0)
        count = list_visible(second, far[row], dim, lines, count)
        part = slice(row * heads, (row + 1) * heads)
        attend(
            queries[part],
            lines[:count],
            vector(sink, heads, np.float32),
            np.float32(scale),
            scores,
            results[part],
        )


def sink_attention(
    query: Tensor, lists: tuple[Listed, ...], sink: Tensor, *, scale: float
) -> Tensor:
    """As `api.sink_attention` for one or two lists, all float32."""
    rows, heads, dim = query.shape
    query = query.contiguous()
    pools = [float_rows(listed.pool, dim) for listed in lists]
    places = [listed.index.contiguous() for listed in lists]
    if len(lists) == 1:  # a second list of no entries
        pools, places = pools * 2, [*places, places[0][:, :0]]
    out = torch.empty_like(query)
    _run(
        query.data_ptr(),
        pools[0].data_ptr(),
        places[0].data_ptr(),
        pools[1].data_ptr(),
        places[1].data_ptr(),
        sink.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        dim,
        places[0].shape[1],
        places[1].shape[1],
        scale,
    )
    return out

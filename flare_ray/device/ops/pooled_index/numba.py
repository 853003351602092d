"""Pooling, scoring and selection on CPU, each pool and row by itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, inner, inner_ordered, kernel, matrix, vector
from flare_ray.device.ops.panels.numba import PANEL, product_wide


@kernel("iiiiii")
def _run(rows, ape, out, pools, pool, dim):
    # Each row of a pool is its key and, behind it, its gate.
    values = cube(rows, pools, pool, 2 * dim, np.float32)
    shift, results = matrix(ape, pool, dim, np.float32), matrix(out, pools, dim, np.float32)
    for p in range(pools):
        for i in range(dim):
            highest = np.float32(-np.inf)
            for t in range(pool):
                highest = max(highest, values[p, t, dim + i] + shift[t, i])
            total, mixed = np.float32(0.0), np.float32(0.0)
            for t in range(pool):
                weight = np.exp(values[p, t, dim + i] + shift[t, i] - highest)
                total += weight
                mixed += weight * values[p, t, i]
            results[p, i] = mixed / total


@inner
def fill_panel(keys, panel):
    """Up to 64 keys [some, D] side by side as [D, 64], zeros behind them."""
    for i in range(PANEL):
        for c in range(panel.shape[0]):
            panel[c, i] = keys[i, c] if i < keys.shape[0] else np.float32(0.0)


@inner
def add_heads(products, weights, scale, scores):
    """scores [some] = sum over heads of weight times the positive part of products [H, 64]."""
    scores[:] = np.float32(0.0)
    for head in range(products.shape[0]):
        weight = weights[head] * scale
        for i in range(scores.shape[0]):
            scores[i] += weight * max(products[head, i], np.float32(0.0))


@kernel("iiiiiiiiif")
def _score(query, keys, weights, out, lanes, width, heads, pools, dim, scale):
    lines, results = (
        cube(keys, lanes, pools, dim, np.float32),
        matrix(out, lanes * width, pools, np.float32),
    )
    panel, products = np.empty((dim, PANEL), np.float32), np.empty((heads, PANEL), np.float32)
    ones = np.ones(heads, np.float32)
    for lane in range(lanes):
        for at in range(0, pools, PANEL):
            part = slice(at, min(at + PANEL, pools))
            fill_panel(lines[lane, part], panel)
            for row in range(lane * width, (lane + 1) * width):
                first = query + row * heads * dim * 4
                product_wide(first, panel.ctypes.data, products.ctypes.data, heads, PANEL, dim)
                shares = vector(weights + row * heads * 4, heads, np.float32) if weights else ones
                add_heads(products, shares, np.float32(scale), results[row, part])


@inner_ordered
def choose(scores, chosen):
    """Numbers of the best scores [seen] in ascending order, equal ones from the lowest on, then
    -1."""
    seen, wanted = scores.shape[0], min(scores.shape[0], chosen.shape[0])
    chosen[:] = -1  # all of them: where scores are NaN, fewer than wanted are found
    if wanted == 0:
        return
    least = np.partition(scores, seen - wanted)[seen - wanted]
    equal = wanted
    for pool in range(seen):
        equal -= scores[pool] > least
    place = 0
    for pool in range(seen):
        if scores[pool] > least or (scores[pool] == least and equal > 0):
            equal -= scores[pool] == least
            chosen[place] = pool
            place += 1


@kernel("iiiiii", ordered=True)
def _choose(scores, visible, out, rows, pools, count):
    lines, results = (
        matrix(scores, rows, pools, np.float32),
        matrix(out, rows, count, np.int64),
    )
    seen = vector(visible, rows, np.int64)
    for row in range(rows):
        choose(lines[row, : max(0, min(seen[row], pools))], results[row])


def pool_keys(rows: Tensor, ape: Tensor) -> Tensor:
    """As `api.pool_keys`, float32."""
    rows = rows.contiguous()
    pools, pool, _, dim = rows.shape
    out = torch.empty((pools, dim))
    _run(rows.data_ptr(), ape.data_ptr(), out.data_ptr(), pools, pool, dim)
    return out


def pool_scores(query: Tensor, keys: Tensor, weights: Tensor | None) -> Tensor:
    """As `api.pool_scores`, every operand float32."""
    lanes, width, heads, dim = query.shape
    query, keys = query.contiguous(), keys.contiguous()
    scale = dim**-0.5
    if weights is not None:
        weights, scale = weights.contiguous(), scale * heads**-0.5
    out = torch.empty((lanes, width, keys.shape[1]))
    _score(
        query.data_ptr(),
        keys.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        out.data_ptr(),
        lanes,
        width,
        heads,
        keys.shape[1],
        dim,
        scale,
    )
    return out


def best_pools(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    """As `api.best_pools`."""
    scores, visible = scores.contiguous(), visible.contiguous()
    pools = scores.shape[-1]
    chosen = torch.empty((*scores.shape[:-1], min(count, pools)), dtype=torch.int64)
    sizes = (visible.numel(), pools, chosen.shape[-1])
    _choose(scores.data_ptr(), visible.data_ptr(), chosen.data_ptr(), *sizes)
    return chosen

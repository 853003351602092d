"""The chosen experts of any number of rows on CPU: expert by expert, the rows that chose it.

Only chosen experts are read or computed. A row's sum runs over its experts in their order, the
shared ones last, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import float_rows, inner, kernel, matrix
from flare_ray.device.ops.panels.numba import PANEL, narrows, packed, product_narrow, product_wide


class StoredExperts(NamedTuple):
    """Panels of gate_up [E + shared, 2 I, H] and down [E + shared, H, I], of one stored type; width
    I and hidden H."""

    gate_up: Tensor
    down: Tensor
    width: int
    hidden: int


@inner
def gather(x, routing, expert, everyone, rows, shares):
    """Numbers and shares of the rows that chose an expert; how many."""
    chosen, weights = routing
    count = 0
    for row in range(x.shape[0]):
        if everyone:
            rows[count], shares[count] = row, np.float32(1.0)
            count += 1
        else:
            for place in range(chosen.shape[1]):
                if chosen[row, place] == expert:
                    rows[count], shares[count] = row, weights[row, place]
                    count += 1
    return count


@inner
def activate(both, shares, active, count, limit):
    """active[r] = share times clamped SwiGLU of [gate, up] rows."""
    width = active.shape[1]
    for row in range(count):
        for i in range(width):
            gate = min(both[row, i], limit)
            up = min(max(both[row, width + i], -limit), limit)
            active[row, i] = shares[row] * up * gate / (np.float32(1.0) + np.exp(-gate))


def _experts(product: Any, element_bytes: int) -> Any:
    """The loop over experts for one stored type."""

    @inner
    def run(x, gate_up, down, routing, out, scratch, sizes, shared, bound):
        rows, shares, inputs, both, active, outputs = scratch
        total, width, hidden = sizes
        first_bytes = -(-2 * width // PANEL) * PANEL * hidden * element_bytes
        second_bytes = -(-hidden // PANEL) * PANEL * width * element_bytes
        out[:] = np.float32(0.0)
        for expert in range(total):
            count = gather(x, routing, expert, expert >= total - shared, rows, shares)
            if count == 0:
                continue
            for r in range(count):
                inputs[r] = x[rows[r]]
            first, second = gate_up + expert * first_bytes, down + expert * second_bytes
            product(inputs.ctypes.data, first, both.ctypes.data, count, 2 * width, hidden)
            activate(both, shares, active, count, bound)
            product(active.ctypes.data, second, outputs.ctypes.data, count, hidden, width)
            for r in range(count):
                line = out[rows[r]]
                for j in range(hidden):
                    line[j] += outputs[r, j]

    return run


_narrow: Any = _experts(product_narrow, 2)
_wide: Any = _experts(product_wide, 4)


@kernel("iiiiiiiiiiiiif")
def _run(
    x, gate_up, down, chosen, weights, out, rows, top_k, total, width, hidden, shared, narrow, limit
):
    values, results = matrix(x, rows, hidden, np.float32), matrix(out, rows, hidden, np.float32)
    routing = (matrix(chosen, rows, top_k, np.int64), matrix(weights, rows, top_k, np.float32))
    scratch = (
        np.empty(rows, np.int64),
        np.empty(rows, np.float32),
        np.empty((rows, hidden), np.float32),
        np.empty((rows, 2 * width), np.float32),
        np.empty((rows, width), np.float32),
        np.empty((rows, hidden), np.float32),
    )
    sizes, bound = (total, width, hidden), np.float32(limit)
    if narrow:
        _narrow(values, gate_up, down, routing, results, scratch, sizes, shared, bound)
    else:
        _wide(values, gate_up, down, routing, results, scratch, sizes, shared, bound)


def stored(gate_up: Tensor, down: Tensor) -> StoredExperts:
    """Panels of gate_up [E + shared, 2 I, H] and down [E + shared, I, H] float32."""
    narrow = narrows(gate_up, down)
    first, second = (packed(w, narrow=narrow) for w in (gate_up, down.transpose(1, 2)))
    return StoredExperts(first, second, down.shape[1], down.shape[2])


def chosen_experts(
    x: Tensor, held: StoredExperts, experts: Tensor, weights: Tensor, *, shared: int, limit: float
) -> Tensor:
    """As `Experts.__call__` for rows x [R, H] float32; the shared experts are included."""
    x = float_rows(x, held.hidden)
    experts, weights = experts.contiguous(), weights.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, held.hidden))
    _run(
        x.data_ptr(),
        held.gate_up.data_ptr(),
        held.down.data_ptr(),
        experts.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        rows,
        experts.shape[1],
        held.gate_up.shape[0],
        held.width,
        held.hidden,
        shared,
        held.down.dtype == torch.bfloat16,
        limit,
    )
    return out

"""The chosen experts of any number of rows on CPU: expert by expert, the rows that chose it.

Only chosen experts are read or computed. A row's sum runs over its experts in their order, the
shared ones last, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.moe.reference import Rounding, Routing
from flare_ray.device.ops.numba import cube, float_rows, inner, kernel, matrix
from flare_ray.device.ops.panels.numba import PANEL, narrows, packed, product_narrow, product_wide


class StoredExperts(NamedTuple):
    """Panels of gate_up [E + shared, 2 I, H] and down [E + shared, H, I], of one stored type; width
    I and hidden H."""

    gate_up: Tensor
    down: Tensor
    width: int
    hidden: int


@inner
def gather(x, routing, expert, unweighted, members):
    """Rows that chose an expert, their shares, and its place among their choices; how many.

    unweighted: number of a shared expert that every row takes, counted from 0; negative = none.
    """
    chosen, weights = routing
    rows, shares, places = members
    count = 0
    for row in range(x.shape[0]):
        if unweighted >= 0:
            rows[count], shares[count] = row, np.float32(1.0)
            places[count] = chosen.shape[1] + unweighted
            count += 1
        else:
            for place in range(chosen.shape[1]):
                if chosen[row, place] == expert:
                    rows[count], shares[count] = row, weights[row, place]
                    places[count] = place
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


def _halves(product: Any, element_bytes: int) -> Any:
    """Both products of one expert for one stored type."""

    @inner
    def activated(x, panels, members, count, scratch, sizes, bound, expert):
        """Fill the first `count` rows of the activation."""
        inputs, both, active, _outputs = scratch
        _total, width, hidden = sizes
        for r in range(count):
            inputs[r] = x[members[0][r]]
        first = panels + expert * (-(-2 * width // PANEL) * PANEL * hidden * element_bytes)
        product(inputs.ctypes.data, first, both.ctypes.data, count, 2 * width, hidden)
        activate(both, members[1], active, count, bound)

    @inner
    def added(panels, members, count, scratch, sizes, expert, out):
        """Add the activation's products to the rows they came from."""
        _inputs, _both, active, outputs = scratch
        _total, width, hidden = sizes
        second = panels + expert * (-(-hidden // PANEL) * PANEL * width * element_bytes)
        product(active.ctypes.data, second, outputs.ctypes.data, count, hidden, width)
        for r in range(count):
            line = out[members[0][r]]
            for j in range(hidden):
                line[j] += outputs[r, j]

    return activated, added


_narrow_first, _narrow_second = _halves(product_narrow, 2)
_wide_first, _wide_second = _halves(product_wide, 4)


@inner
def room(rows, width, hidden):
    """Members of an expert, and what its products read and write."""
    members = (np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.int64))
    scratch = (
        np.empty((rows, hidden), np.float32),
        np.empty((rows, 2 * width), np.float32),
        np.empty((rows, width), np.float32),
        np.empty((rows, hidden), np.float32),
    )
    return members, scratch


@kernel("iiiiiiiiiiiiif")
def _run(
    x, gate_up, down, chosen, weights, out, rows, top_k, total, width, hidden, shared, narrow, limit
):
    values, results = matrix(x, rows, hidden, np.float32), matrix(out, rows, hidden, np.float32)
    routing = (matrix(chosen, rows, top_k, np.int64), matrix(weights, rows, top_k, np.float32))
    members, scratch = room(rows, width, hidden)
    sizes, bound = (total, width, hidden), np.float32(limit)
    results[:] = np.float32(0.0)
    for expert in range(total):
        count = gather(values, routing, expert, expert - total + shared, members)
        if count == 0:
            continue
        if narrow:
            _narrow_first(values, gate_up, members, count, scratch, sizes, bound, expert)
            _narrow_second(down, members, count, scratch, sizes, expert, results)
        else:
            _wide_first(values, gate_up, members, count, scratch, sizes, bound, expert)
            _wide_second(down, members, count, scratch, sizes, expert, results)


@kernel("iiiiiiiiiiiif")
def _first(
    x, gate_up, chosen, weights, out, rows, top_k, total, width, hidden, shared, narrow, limit
):
    """out [rows, top_k + shared, width]: weighted activations by row and place."""
    values = matrix(x, rows, hidden, np.float32)
    results = cube(out, rows, top_k + shared, width, np.float32)
    routing = (matrix(chosen, rows, top_k, np.int64), matrix(weights, rows, top_k, np.float32))
    members, scratch = room(rows, width, hidden)
    sizes, bound = (total, width, hidden), np.float32(limit)
    for expert in range(total):
        count = gather(values, routing, expert, expert - total + shared, members)
        if count == 0:
            continue
        if narrow:
            _narrow_first(values, gate_up, members, count, scratch, sizes, bound, expert)
        else:
            _wide_first(values, gate_up, members, count, scratch, sizes, bound, expert)
        for r in range(count):
            results[members[0][r], members[2][r]] = scratch[2][r]


@kernel("iiiiiiiiiiii")
def _second(active, down, chosen, weights, out, rows, top_k, total, width, hidden, shared, narrow):
    """out [rows, hidden] of active [rows, top_k + shared, width]."""
    values = cube(active, rows, top_k + shared, width, np.float32)
    results = matrix(out, rows, hidden, np.float32)
    routing = (matrix(chosen, rows, top_k, np.int64), matrix(weights, rows, top_k, np.float32))
    members, scratch = room(rows, width, hidden)
    sizes = (total, width, hidden)
    results[:] = np.float32(0.0)
    for expert in range(total):
        count = gather(results, routing, expert, expert - total + shared, members)
        if count == 0:
            continue
        for r in range(count):
            scratch[2][r] = values[members[0][r], members[2][r]]
        if narrow:
            _narrow_second(down, members, count, scratch, sizes, expert, results)
        else:
            _wide_second(down, members, count, scratch, sizes, expert, results)


def stored(gate_up: Tensor, down: Tensor) -> StoredExperts:
    """Panels of gate_up [E + shared, 2 I, H] and down [E + shared, I, H] float32."""
    narrow = narrows(gate_up, down)
    first, second = (packed(w, narrow=narrow) for w in (gate_up, down.transpose(1, 2)))
    return StoredExperts(first, second, down.shape[1], down.shape[2])


def chosen_experts(
    x: Tensor,
    held: StoredExperts,
    routing: Routing,
    *,
    shared: int,
    limit: float,
    rounding: Rounding | None = None,
) -> Tensor:
    """As `Experts.__call__` for rows x [R, H] float32, rounded already where experts have a
    `rounding`; the shared experts are included."""
    x = float_rows(x, held.hidden)
    experts, weights = routing.experts.contiguous(), routing.weights.contiguous()
    (rows, top_k), total = experts.shape, held.gate_up.shape[0]
    sizes = (rows, top_k, total, held.width, held.hidden, shared, held.down.dtype == torch.bfloat16)
    listed = (experts.data_ptr(), weights.data_ptr())
    first, second = held.gate_up.data_ptr(), held.down.data_ptr()
    out = torch.empty((rows, held.hidden))
    if rounding is None:
        _run(x.data_ptr(), first, second, *listed, out.data_ptr(), *sizes, limit)
        return out
    active = torch.empty((rows, top_k + shared, held.width))
    _first(x.data_ptr(), first, *listed, active.data_ptr(), *sizes, limit)
    active = rounding(active).contiguous()
    _second(active.data_ptr(), second, *listed, out.data_ptr(), *sizes)
    return out

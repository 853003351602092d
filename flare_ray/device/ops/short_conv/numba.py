"""The convolution of a round with its history on CPU: reads the window, convolves, writes it back.

One pass instead of a gather, a concatenation, a scatter, four products and an activation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, inner, kernel, matrix, vector
from flare_ray.device.ops.vectors.numba import sigmoid

TAPS = 4


@inner
def _row(history, values, row, stride, place):
    """Row `place` of a lane's history and new rows, of which `row` is the first."""
    kept, channels = history.shape
    first = (row + place - kept) * stride
    return history[place] if place < kept else values[first : first + channels]


@kernel("iiiiiiiiiiii")
def _round(raw, window, taps, slots, column, out, lanes, width, channels, stride, depth, places):
    # A view of wider rows: only the first `channels` of each `stride` belong to it.
    values = vector(raw, (lanes * width - 1) * stride + channels, np.float32)
    windows = cube(window, places, depth, channels, np.float32)
    weights = matrix(taps, TAPS, channels, np.float32)
    results = matrix(out, lanes * width, channels, np.float32)
    slot, live = vector(slots, lanes, np.int64), vector(column, lanes, np.int64)
    history = np.empty((TAPS - 1, channels), np.float32)
    wa, wb, wc, wd = weights[0], weights[1], weights[2], weights[3]
    for lane in range(lanes):
        kept, row = windows[slot[lane]], lane * width
        # A copy: the rows read may be among those written.
        for place in range(TAPS - 1):
            history[place] = kept[live[lane] + 1 + place]
        for place in range(TAPS - 1 + width):
            kept[place] = _row(history, values, row, stride, place)
        for t in range(width):
            a = _row(history, values, row, stride, t)
            b = _row(history, values, row, stride, t + 1)
            c = _row(history, values, row, stride, t + 2)
            d = _row(history, values, row, stride, t + 3)
            result = results[row + t]
            for i in range(channels):
                total = a[i] * wa[i] + b[i] * wb[i] + c[i] * wc[i] + d[i] * wd[i]
                result[i] = total * sigmoid(total)


def round_conv(
    raw: Tensor, window: Tensor, taps: Tensor, *, slots: Tensor, column: Tensor
) -> Tensor:
    """See `api.round_conv`."""
    lanes, total, channels = slots.shape[0], raw.shape[0], taps.shape[1]
    slots, column, taps = slots.contiguous(), column.contiguous(), taps.contiguous()
    out = torch.empty((total, channels))
    _round(
        raw.data_ptr(),
        window.data_ptr(),
        taps.data_ptr(),
        slots.data_ptr(),
        column.data_ptr(),
        out.data_ptr(),
        lanes,
        total // lanes,
        channels,
        raw.stride(0),
        window.shape[1],
        window.shape[0],
    )
    return out

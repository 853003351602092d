"""Codes of four bits into panels of float32, for the experts that a pass chose.

A value is the code's times its scale's, which is exact, and then the matrix's own factor, applied
as the format's `dequantise` does it: the panels hold the bits that dequantising at load gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.moe.packed import Fp4Stack, Mxfp4Stack
from flare_ray.device.ops.numba import inner_ordered, kernel, matrix, vector
from flare_ray.device.ops.panels.numba import PANEL
from flare_ray.device.weights.formats.nvfp4 import MAGNITUDES

_CODES = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)])
_BYTES = torch.arange(256, dtype=torch.uint8)
_EXPONENTS = _BYTES.view(torch.float8_e8m0fnu).to(torch.float32)
_E4M3 = _BYTES.view(torch.float8_e4m3fn).to(torch.float32)
NO_FACTOR, MULTIPLIES, DIVIDES = range(3)


@inner_ordered
def unpack_row(codes, scales, tables, factor, sense, line):
    """One matrix row into a column of its panel: line[k * PANEL]."""
    values, sizes = tables
    group = 2 * codes.shape[0] // scales.shape[0]
    for byte in range(codes.shape[0]):
        packed = codes[byte]
        scale = sizes[scales[2 * byte // group]]
        for half in range(2):
            value = values[(packed >> (4 * half)) & 15] * scale
            if sense == MULTIPLIES:
                value = value * factor
            elif sense == DIVIDES:
                value = value / factor
            line[(2 * byte + half) * PANEL] = value


@kernel("iiiiiiiiiiiiii", ordered=True)
def _unpack(
    codes,
    scales,
    factors,
    values,
    sizes,
    chosen,
    out,
    count,
    experts,
    rows,
    depth,
    group,
    first,
    sense,
):
    """Panels of one product of every chosen expert; its factors are those from place `first` on,
    gate's for the first half of the rows and up's for the second where `first` is 0."""
    tables = (vector(values, 16, np.float32), vector(sizes, 256, np.float32))
    ids, needed = vector(chosen, count, np.int64), np.zeros(experts, np.bool_)
    for i in range(count):
        if ids[i] < experts:
            needed[ids[i]] = True
    whole = -(-rows // PANEL) * PANEL * depth
    for expert in range(experts):
        if not needed[expert]:
            continue
        panels = vector(out + expert * whole * 4, whole, np.float32)
        lines = matrix(codes + expert * rows * depth // 2, rows, depth // 2, np.uint8)
        shared = matrix(scales + expert * rows * depth // group, rows, depth // group, np.uint8)
        for row in range(rows):
            factor = np.float32(1.0)
            if sense != NO_FACTOR:
                own = vector(factors + expert * 12, 3, np.float32)
                factor = own[first + (1 if first == 0 and 2 * row >= rows else 0)]
            start = row // PANEL * PANEL * depth + row % PANEL
            unpack_row(lines[row], shared[row], tables, factor, sense, panels[start:])
        for row in range(rows, -(-rows // PANEL) * PANEL):
            start = row // PANEL * PANEL * depth + row % PANEL
            panels[start::PANEL][:depth] = np.float32(0.0)


def unpack(stack: Fp4Stack, chosen: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Write the panels of chosen experts.

    Args:
        stack: on CPU.
        chosen: int64 experts; numbers beyond the stack's are left alone.
        gate_up, down: panels [>= E, ..] float32 (`panels.packed`), written in place.
    """
    sense, factors, table = NO_FACTOR, 0, _EXPONENTS
    if not isinstance(stack, Mxfp4Stack):
        sense, factors = DIVIDES if stack.divides else MULTIPLIES, stack.factors.data_ptr()
        table = _E4M3
    chosen = chosen.contiguous()
    products: Any = (
        (stack.gate_up, stack.gate_up_scale, gate_up, 0),
        (stack.down, stack.down_scale, down, 2),
    )
    for codes, scales, panels, first in products:
        experts, rows, half = codes.shape
        _unpack(
            codes.data_ptr(),
            scales.data_ptr(),
            factors,
            _CODES.data_ptr(),
            table.data_ptr(),
            chosen.data_ptr(),
            panels.data_ptr(),
            chosen.numel(),
            experts,
            rows,
            2 * half,
            2 * half // scales.shape[2],
            first,
            sense,
        )

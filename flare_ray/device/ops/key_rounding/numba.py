"""Roundings on CPU, a group of channels at a time: the bits of the torch forms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import inner_ordered, kernel, vector

FP8, FP4, FP4_E4M3 = 0, 1, 2
KINDS = {"round_fp8": FP8, "round_fp4": FP4, "round_fp4_e4m3": FP4_E4M3}
"""Numbers of the roundings for the kernel."""
_BITS_CUT = 20
"""Mantissa bits of float32 beyond those of E4M3."""


@inner_ordered
def to_e4m3(value):
    """The nearest E4M3 of a float of at most 448, ties to even."""
    if not abs(value) >= np.float32(2.0**-6):  # NaN among them
        return np.rint(value * np.float32(512.0)) * np.float32(2.0**-9)
    bits = np.int64(np.float32(value).view(np.int32))
    bits += ((1 << (_BITS_CUT - 1)) - 1) + ((bits >> _BITS_CUT) & 1)
    return np.int32((bits >> _BITS_CUT) << _BITS_CUT).view(np.float32)


@inner_ordered
def power_of_two_above(value):
    """2^ceil(log2(value)) of a positive float."""
    bits = np.int64(np.float32(value).view(np.int32))
    return np.int32(((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23).view(np.float32)


@inner_ordered
def to_e2m1(value):
    """The nearest E2M1 of a float of at most 6, ties to even codes."""
    size = abs(value)
    step = np.float32(0.5)
    if size >= np.float32(4.0):
        step = np.float32(2.0)
    elif size >= np.float32(2.0):
        step = np.float32(1.0)
    return np.rint(value / step) * step


@inner_ordered
def bounded(value, limit):
    """Between -limit and limit; NaN stays."""
    if value > limit:
        return limit
    return -limit if value < -limit else value


@inner_ordered
def largest(values, floor):
    """Largest size, at least `floor`; NaN if one is."""
    highest = np.float32(floor)
    for i in range(values.shape[0]):
        size = abs(values[i])
        if size > highest or size != size:
            highest = size
            if size != size:
                return highest
    return highest


@inner_ordered
def round_fp8(values, out):
    """One group in E4M3 with a power of two as scale."""
    scale = power_of_two_above(largest(values, 1e-4) * np.float32(1 / 448.0))
    for i in range(values.shape[0]):
        out[i] = to_e4m3(bounded(values[i] / scale, np.float32(448.0))) * scale


@inner_ordered
def round_fp4(values, out, scale):
    """One group in E2M1."""
    for i in range(values.shape[0]):
        out[i] = to_e2m1(bounded(values[i] / scale, np.float32(6.0))) * scale


@kernel("iiiii", ordered=True)
def _run(x, out, groups, size, kind):
    values, results = (
        vector(x, groups * size, np.float32),
        vector(out, groups * size, np.float32),
    )
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        source, target = values[part], results[part]
        if kind == FP8:
            round_fp8(source, target)
        elif kind == FP4:
            most = largest(source, 6.0 * 2.0**-126)
            round_fp4(source, target, power_of_two_above(most * np.float32(1 / 6.0)))
        else:
            most = largest(source, 6.0 * 2.0**-9) / np.float32(6.0)
            round_fp4(source, target, to_e4m3(bounded(most, np.float32(448.0))))


def round_groups(x: Tensor, *, group: int, kind: int) -> Tensor:
    """x float32 with its last dimension's groups rounded."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _run(x.data_ptr(), out.data_ptr(), x.numel() // group, group, kind)
    return out

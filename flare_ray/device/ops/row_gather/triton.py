"""One program a row: page-locked host memory is read over the bus where it lies.

A row of 160 to 256 channels is 256 to 512 bytes, two to four requests of a warp; what counts is
that all rows of a round are under way at once, so nothing waits for a copy or for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.row_gather.api import StoredRows


@triton.jit
def _gather(
    values, exponents, numbers, out, scale, width, group, PACKED: tl.constexpr, SIZE: tl.constexpr
):
    """values [N, width]; exponents [N, width / group] of packed ones; out [R, width]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    place = tl.arange(0, SIZE)
    inside = place < width
    value = tl.load(values + number * width + place, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        at = number * (width // group) + place // group
        exponent = tl.load(exponents + at, mask=inside, other=0).to(tl.int32)
        value = value * (exponent << 23).to(tl.float32, bitcast=True)
    value = value * scale
    tl.store(out + row * width + place, value.to(out.dtype.element_ty), mask=inside)


def gather(stored: StoredRows, numbers: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Rows [R, D] of `dtype` on the numbers' device.

    Args:
        stored: page-locked, in one part.
        numbers: [R] int64.
    """
    values = stored.values[0]
    exponents = stored.exponents[0] if stored.exponents else None
    count, width = numbers.shape[0], values.shape[1]
    out = torch.empty((count, width), dtype=dtype, device=numbers.device)
    packed = exponents is not None
    _gather[(count,)](
        values,
        values if exponents is None else exponents,
        numbers.contiguous(),
        out,
        stored.scale,
        width,
        width if exponents is None else width // exponents.shape[1],
        PACKED=packed,
        SIZE=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out

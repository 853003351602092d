"""The delta rule of a round on CUDA, gates included: one program per lane, head and value slice.

The state's columns are independent of each other (S^T k, the update and S^T q act on columns), so
a head's [D, D] matrix is cut into slices of 32 value channels: 256 programs at one lane of 64
heads, each with a [128, 32] tile in registers that is read once, carried through the round's rows
and written after every row (contract: M2). Bound by bytes: 4 MB read and 4 MB written per row at
64 heads of 128 x 128.

q and k are normalised by every slice again, which is cheaper than a kernel. The output norm needs
whole heads, which slices do not have: a second small kernel applies norm and gate.

Why not a library: FLA's recurrent kernel takes bfloat16 or float32 gates before the bound and its
own state order; this one reads the convolution's output, the projections as they come and the
state store's columns, and saves the five operators between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.ops.kda.gated import GatedRows, Gates

_SLICE = 32


@triton.jit
def _delta_round(
    qkv,
    outer,
    beta,
    factor,
    offset,
    rows,
    read,
    write,
    out,
    width,
    beta_stride,
    bound,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLICE: tl.constexpr,
):
    """qkv [B T, 3, H, D]; outer, out [B T, H, D]; beta [B T] rows of H; rows [M, H, D, D]."""
    lane = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, DIM)
    value = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    tile = head * DIM * DIM + key[:, None] * DIM + value[None, :]
    start = tl.load(read + lane).to(tl.int64)
    state = tl.load(rows + start * HEADS * DIM * DIM + tile)
    gate_factor = tl.load(factor + head * DIM + key)
    gate_offset = tl.load(offset + head * DIM + key)
    for step in range(width):
        row = (lane * width + step).to(tl.int64)
        first = qkv + row * 3 * HEADS * DIM + head * DIM
        q = tl.load(first + key)
        k = tl.load(first + HEADS * DIM + key)
        v = tl.load(first + 2 * HEADS * DIM + value)
        q = q / tl.sqrt((tl.sum(q * q, axis=0) + 1e-6) * DIM)
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        raw = tl.load(outer + row * HEADS * DIM + head * DIM + key).to(tl.float32)
        decay = tl.exp(bound / (1.0 + tl.exp(-(gate_offset + raw * gate_factor))))
        share = tl.load(beta + row * beta_stride + head).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-share))
        state = state * decay[:, None]
        delta = (v - tl.sum(state * k[:, None], axis=0)) * share
        state += k[:, None] * delta[None, :]
        tl.store(out + row * HEADS * DIM + head * DIM + value, tl.sum(state * q[:, None], axis=0))
        end = tl.load(write + row).to(tl.int64)
        tl.store(rows + end * HEADS * DIM * DIM + tile, state)


@triton.jit
def _gated_norm(x, gate, weight, out, floor, DIM: tl.constexpr):
    """x [R H, D] float32, weight [D], gate [R H, D] raw -> out [R H, D]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, DIM)
    values = tl.load(x + row * DIM + place)
    raw = tl.load(gate + row * DIM + place).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, axis=0) + floor)
    result = values / length * tl.load(weight + place) / (1.0 + tl.exp(-raw))
    tl.store(out + row * DIM + place, result.to(out.dtype.element_ty))


def gated_round(
    rows: GatedRows, gates: Gates, saved: Tensor, *, read: Tensor, write: Tensor
) -> Tensor:
    """See `gated.gated_round`."""
    heads, dim = saved.shape[1:3]
    lanes, total = read.shape[0], write.shape[0]
    outer = rows.outer.contiguous()
    result = rows.qkv.new_empty((total, heads * dim))
    slice_width = min(_SLICE, dim)
    _delta_round[(lanes, heads, dim // slice_width)](
        rows.qkv,
        outer[0],
        rows.beta,
        gates.factor,
        gates.offset,
        saved,
        read.contiguous(),
        write.contiguous(),
        result,
        total // lanes,
        rows.beta.stride(0),
        gates.bound,
        HEADS=heads,
        DIM=dim,
        SLICE=slice_width,
        num_warps=4,
    )
    out = torch.empty_like(outer[1])
    _gated_norm[(total * heads,)](
        result, outer[1], gates.norm, out, gates.floor, DIM=dim, num_warps=1
    )
    return out

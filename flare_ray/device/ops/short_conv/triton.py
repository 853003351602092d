"""The convolution of a round with its history on CUDA: reads the window, convolves, writes it back.

grid (lanes, slices of channels). A lane's history lies in its slot's window behind the column that
the last round ended with, so a rejected row is dropped by reading elsewhere. The program holds the
last K - 1 rows of its channels in registers; every row it passes goes to the window, whose places
0 .. K - 2 + T become this round's candidates. One kernel instead of a gather, a concatenation, a
scatter, K products and an activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLICE = 512


@triton.jit
def _round(
    raw,
    window,
    taps,
    slots,
    column,
    out,
    width,
    channels,
    raw_stride,
    depth,
    SLICE: tl.constexpr,
):
    """raw [B T] rows of `channels`; window [S + 1, depth, channels]; out [B T, channels]."""
    lane = tl.program_id(0)
    place = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = place < channels
    slot = tl.load(slots + lane).to(tl.int64)
    kept = window + slot * depth * channels + place
    live = kept + (tl.load(column + lane).to(tl.int64) + 1) * channels
    a = tl.load(live, mask=inside, other=0.0)
    b = tl.load(live + channels, mask=inside, other=0.0)
    c = tl.load(live + 2 * channels, mask=inside, other=0.0)
    tl.store(kept, a, mask=inside)
    tl.store(kept + channels, b, mask=inside)
    tl.store(kept + 2 * channels, c, mask=inside)
    wa = tl.load(taps + place, mask=inside, other=0.0)
    wb = tl.load(taps + channels + place, mask=inside, other=0.0)
    wc = tl.load(taps + 2 * channels + place, mask=inside, other=0.0)
    wd = tl.load(taps + 3 * channels + place, mask=inside, other=0.0)
    for step in range(width):
        row = (lane * width + step).to(tl.int64)
        d = tl.load(raw + row * raw_stride + place, mask=inside, other=0.0)
        total = a.to(tl.float32) * wa + b.to(tl.float32) * wb
        total += c.to(tl.float32) * wc + d.to(tl.float32) * wd
        tl.store(out + row * channels + place, total / (1.0 + tl.exp(-total)), mask=inside)
        tl.store(kept + (3 + step) * channels, d, mask=inside)
        a, b, c = b, c, d


def round_conv(
    raw: Tensor, window: Tensor, taps: Tensor, *, slots: Tensor, column: Tensor
) -> Tensor:
    """See `api.round_conv`."""
    lanes, channels = slots.shape[0], taps.shape[1]
    total = raw.shape[0]
    out = torch.empty((total, channels), dtype=torch.float32, device=raw.device)
    _round[(lanes, triton.cdiv(channels, _SLICE))](
        raw,
        window,
        taps,
        slots.contiguous(),
        column.contiguous(),
        out,
        total // lanes,
        channels,
        raw.stride(0),
        window.shape[1],
        SLICE=_SLICE,
        num_warps=4,
    )
    return out

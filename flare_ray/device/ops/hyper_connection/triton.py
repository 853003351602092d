"""Stream mixing on CUDA, four streams: three kernels a site.

    project   grid (rows, slices of the flattened streams): each program multiplies one slice of
              one row by the same slice of the projection and leaves 24 partial sums and a square
              sum. Sliced, because one program would read the whole projection (1.5 MB) alone.
    settle    grid (rows, slices of H): adds the partial sums in one fixed order, squashes them, and
              mixes a slice of the streams into the block's input. The program of slice 0 also runs
              the Sinkhorn passes and writes what `mix_out` needs.
    mix_out   grid (rows, slices of H).

The 4 x 4 matrix lives in 16 scalars: a reduction over a 4 x 4 tile would cost two shuffles a sum,
and 39 passes of them are most of the kernel's time. One reciprocal a sum replaces four divisions.
Streams are read in their own type, everything else is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STREAMS = 4
_COEFFICIENTS = (2 + STREAMS) * STREAMS
_PADDED = 32
_SLICE = 256
"""Channels of a projection slice: 64 programs a row at H = 4,096, two waves at five rows."""
_MIX_SLICE = 1024


@triton.jit
def _project(flat, projection, partial, width, SLICE: tl.constexpr, PADDED: tl.constexpr):
    """partial [R, slices, PADDED]: sums 0 .. 23, the square sum in place 24."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slices = tl.num_programs(1)
    place = part * SLICE + tl.arange(0, SLICE)
    inside = place < width
    values = tl.load(flat + row * width + place, mask=inside, other=0.0).to(tl.float32)
    line = tl.arange(0, PADDED)
    weight = tl.load(
        projection + line[:, None] * width + place[None, :],
        mask=(line < 24)[:, None] & inside[None, :],
        other=0.0,
    )
    sums = tl.sum(weight * values[None, :], axis=1)
    square = tl.sum(values * values, axis=0)
    sums = tl.where(line == 24, square, sums)
    tl.store(partial + (row * slices + part) * PADDED + line, sums)


@triton.jit
def _pick(values, line, place: tl.constexpr):
    return tl.sum(tl.where(line == place, values, 0.0), axis=0)


@triton.jit
def _normalised(a, b, c, d, eps):
    factor = 1.0 / (a + b + c + d + eps)
    return a * factor, b * factor, c * factor, d * factor


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    factor = 1.0 / (a + b + c + d)
    return a * factor + eps, b * factor + eps, c * factor + eps, d * factor + eps


@triton.jit
def _sinkhorn(raw, line, out, iterations, eps):
    """The 16 logits at places 8 .. 23 of `raw`, normalised, to out[0 .. 15]."""
    a0, a1, a2, a3 = _softmax(
        _pick(raw, line, 8), _pick(raw, line, 9), _pick(raw, line, 10), _pick(raw, line, 11), eps
    )
    b0, b1, b2, b3 = _softmax(
        _pick(raw, line, 12), _pick(raw, line, 13), _pick(raw, line, 14), _pick(raw, line, 15), eps
    )
    c0, c1, c2, c3 = _softmax(
        _pick(raw, line, 16), _pick(raw, line, 17), _pick(raw, line, 18), _pick(raw, line, 19), eps
    )
    d0, d1, d2, d3 = _softmax(
        _pick(raw, line, 20), _pick(raw, line, 21), _pick(raw, line, 22), _pick(raw, line, 23), eps
    )
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            a0, b0, c0, d0 = _normalised(a0, b0, c0, d0, eps)
            a1, b1, c1, d1 = _normalised(a1, b1, c1, d1, eps)
            a2, b2, c2, d2 = _normalised(a2, b2, c2, d2, eps)
            a3, b3, c3, d3 = _normalised(a3, b3, c3, d3, eps)
        else:
            a0, a1, a2, a3 = _normalised(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _normalised(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _normalised(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _normalised(d0, d1, d2, d3, eps)
    tl.store(out + 0, a0)
    tl.store(out + 1, a1)
    tl.store(out + 2, a2)
    tl.store(out + 3, a3)
    tl.store(out + 4, b0)
    tl.store(out + 5, b1)
    tl.store(out + 6, b2)
    tl.store(out + 7, b3)
    tl.store(out + 8, c0)
    tl.store(out + 9, c1)
    tl.store(out + 10, c2)
    tl.store(out + 11, c3)
    tl.store(out + 12, d0)
    tl.store(out + 13, d1)
    tl.store(out + 14, d2)
    tl.store(out + 15, d3)


@triton.jit
def _settle(
    streams,
    partial,
    base,
    before,
    x,
    pre_out,
    post,
    mix,
    slices,
    hidden,
    floor,
    iterations,
    eps,
    LATE: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """base [PADDED] with zeros behind; x [R, H]; pre_out, post [R, 4]; mix [R, 16].

    LATE: the input is mixed with `before` [R, 4], the site before's coefficients.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    line = tl.arange(0, PADDED)
    number = tl.arange(0, SLICES)
    sums = tl.load(
        partial + (row * slices + number[:, None]) * PADDED + line[None, :],
        mask=(number < slices)[:, None],
        other=0.0,
    )
    total = tl.sum(sums, axis=0)
    length = tl.sqrt(_pick(total, line, 24) + floor)
    raw = tl.load(base + line) + total / length
    gates = 1.0 / (1.0 + tl.exp(-raw))
    pre = gates + eps
    if part == 0:
        tl.store(pre_out + row * 4 + line, pre, mask=line < 4)
        tl.store(post + row * 4 + (line - 4), 2.0 * gates, mask=(line >= 4) & (line < 8))
        _sinkhorn(raw, line, mix + row * 16, iterations, eps)
    place = part * SLICE + tl.arange(0, SLICE)
    inside = place < hidden
    if LATE:
        pre = tl.load(before + row * 4 + line, mask=line < 4, other=0.0)
    first = streams + row * 4 * hidden + place
    mixed = _pick(pre, line, 0) * tl.load(first, mask=inside, other=0.0).to(tl.float32)
    mixed += _pick(pre, line, 1) * tl.load(first + hidden, mask=inside, other=0.0).to(tl.float32)
    mixed += _pick(pre, line, 2) * tl.load(first + 2 * hidden, mask=inside, other=0.0).to(
        tl.float32
    )
    mixed += _pick(pre, line, 3) * tl.load(first + 3 * hidden, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(x + row * hidden + place, mixed.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _mix_out(block, streams, post, mix, out, hidden, SLICE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = place < hidden
    fresh = tl.load(block + row * hidden + place, mask=inside, other=0.0).to(tl.float32)
    first = streams + row * 4 * hidden + place
    s0 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(first + hidden, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(first + 2 * hidden, mask=inside, other=0.0).to(tl.float32)
    s3 = tl.load(first + 3 * hidden, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(4):
        weight = mix + row * 16 + j
        mixed = tl.load(post + row * 4 + j) * fresh
        mixed += tl.load(weight) * s0 + tl.load(weight + 4) * s1
        mixed += tl.load(weight + 8) * s2 + tl.load(weight + 12) * s3
        place_out = out + (row * 4 + j) * hidden + place
        tl.store(place_out, mixed.to(out.dtype.element_ty), mask=inside)


class Site:
    """One site's constants.

    Args:
        projection: [24, 4 H] float32, already times scale and root of 4 H.
        base: [24] float32.
        floor: norm_eps times 4 H.
        iterations: column passes.
        eps: of every sum and of pre.
    """

    __slots__ = ("_base", "_eps", "_floor", "_iterations", "_projection")

    def __init__(
        self, projection: Tensor, base: Tensor, *, floor: float, iterations: int, eps: float
    ) -> None:
        self._projection = projection.contiguous()
        self._base = torch.zeros(_PADDED, device=base.device)
        self._base[:_COEFFICIENTS] = base
        self._floor = floor
        self._iterations = iterations
        self._eps = eps

    def mix_in(
        self, streams: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Streams [R, 4, H] -> x [R, H] of their type, pre and post [R, 4], mix [R, 4, 4]."""
        streams = streams.contiguous()
        rows, _, hidden = streams.shape
        slices = triton.cdiv(STREAMS * hidden, _SLICE)
        made = streams.new_empty
        partial = made((rows, slices, _PADDED), dtype=torch.float32)
        _project[(rows, slices)](
            streams, self._projection, partial, STREAMS * hidden, _SLICE, _PADDED, num_warps=4
        )
        x = made((rows, hidden))
        pre, post = (made((rows, STREAMS), dtype=torch.float32) for _ in range(2))
        mix = made((rows, STREAMS, STREAMS), dtype=torch.float32)
        _settle[(rows, triton.cdiv(hidden, _MIX_SLICE))](
            streams,
            partial,
            self._base,
            pre if before is None else before.contiguous(),
            x,
            pre,
            post,
            mix,
            slices,
            hidden,
            self._floor,
            self._iterations,
            self._eps,
            before is not None,
            triton.next_power_of_2(slices),
            _MIX_SLICE,
            _PADDED,
            num_warps=4,
        )
        return x, pre, post, mix


def mix_out(block: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See `api.mix_out`; post [R, 4], mix [R, 4, 4] float32."""
    rows, _, hidden = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    _mix_out[(rows, triton.cdiv(hidden, _MIX_SLICE))](
        block.contiguous(),
        streams.contiguous(),
        post.contiguous(),
        mix.contiguous(),
        out,
        hidden,
        _MIX_SLICE,
        num_warps=4,
    )
    return out

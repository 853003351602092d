"""Softmax with temperature, and the nucleus of it, over rows of a vocabulary on CUDA.

A row of 154,880 logits is cut into chunks of 2,048, one program each, so that even one row uses
half of the chip. What chunks must know of each other goes through small tables [row, chunk, ...]
that the next launch reads whole: no atomics, every sum has one order, so ranks that see equal
logits compute equal bits (contract: S6).

    maxima        -> the row's largest logit
    exponentials  e = exp((logit - max) / temperature), and each chunk's sum
    digits        six launches: mass of each value of a 5-bit digit of e's bit pattern, among those
                  whose higher digits are the boundary's. e is in [0, 1] and floats of one sign
                  order like their bits, so after 30 bits the boundary is exact; no sort
    apply         keeps what lies above the boundary, and as many equal ones, by id, as the mass
                  still needs; divides by what was kept

Nine launches: 42, 93, 289 us at 1, 6, 24 rows of 154,880 (H200), most of it the first two digits,
where every element is compared with every value of its digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
BINS = 32
_PASSES = 6
_PART = 512


@triton.jit
def _maxima(logits, maxima, size, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * size + place, mask=place < size, other=float("-inf"))
    tl.store(maxima + row * tl.num_programs(1) + chunk, tl.max(values, axis=0))


@triton.jit
def _exponentials(
    logits, temperature, maxima, out, sums, size, width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """temperature [rows / width]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    number = tl.arange(0, CHUNKS)
    all_maxima = tl.load(maxima + row * chunks + number, mask=number < chunks, other=float("-inf"))
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    values = tl.load(logits + row * size + place, mask=inside, other=float("-inf"))
    heat = tl.load(temperature + row // width)
    values = tl.exp((values - tl.max(all_maxima, axis=0)) / heat)
    tl.store(out + row * size + place, values, mask=inside)
    tl.store(sums + row * chunks + chunk, tl.sum(values, axis=0))


@triton.jit
def _normalise(values, sums, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    number = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(sums + row * chunks + number, mask=number < chunks, other=0.0), axis=0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    at = values + row * size + place
    tl.store(at, tl.load(at, mask=place < size, other=0.0) / total, mask=place < size)


@triton.jit
def _descended(table, row, chunks, prefix, above, goal, CHUNKS: tl.constexpr, BINS: tl.constexpr):
    """One digit further: (prefix with the digit that the boundary has, mass above it)."""
    number = tl.arange(0, CHUNKS)
    digit = tl.arange(0, BINS)
    masses = tl.load(
        table + (row * chunks + number[:, None]) * BINS + digit[None, :],
        mask=(number < chunks)[:, None],
        other=0.0,
    )
    mass = tl.sum(masses, axis=0)
    reached = tl.sum(tl.where(digit[None, :] >= digit[:, None], mass[None, :], 0.0), axis=1) + above
    chosen = tl.maximum(tl.sum((reached >= goal).to(tl.int32), axis=0) - 1, 0)
    higher = tl.sum(tl.where(digit == chosen + 1, reached, 0.0), axis=0)
    above = tl.where(chosen == BINS - 1, above, higher)
    return prefix * BINS + chosen, above


@triton.jit
def _row_goal(sums, top_p, row, chunks, width, CHUNKS: tl.constexpr):
    """(mass that the nucleus must reach, the row's whole mass)."""
    number = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(sums + row * chunks + number, mask=number < chunks, other=0.0), axis=0)
    return tl.load(top_p + row // width) * total, total


@triton.jit
def _digits(
    values,
    sums,
    top_p,
    before,
    after,
    prefixes,
    masses,
    size,
    width,
    number,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    PART: tl.constexpr,
):
    """Table `after` [rows, chunks, BINS] of digit `number` (0 = highest), given `before` of the
    digit above. prefixes, masses [6, rows]: the boundary's digits so far and the mass above."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    rows = tl.num_programs(0)
    chunks = tl.num_programs(1)
    prefix = 0
    above = 0.0
    if number > 0:
        goal, _total = _row_goal(sums, top_p, row, chunks, width, CHUNKS)
        if number > 1:
            prefix = tl.load(prefixes + (number - 1) * rows + row)
            above = tl.load(masses + (number - 1) * rows + row)
        prefix, above = _descended(before, row, chunks, prefix, above, goal, CHUNKS, BINS)
        if chunk == 0:
            tl.store(prefixes + number * rows + row, prefix)
            tl.store(masses + number * rows + row, above)
    shift = 25 - 5 * number
    digit = tl.arange(0, BINS)
    mass = tl.zeros((BINS, PART), tl.float32)
    for start in range(0, CHUNK, PART):
        place = chunk * CHUNK + start + tl.arange(0, PART)
        part = tl.load(values + row * size + place, mask=place < size, other=0.0)
        bits = part.to(tl.int32, bitcast=True) >> shift
        part = tl.where((bits >> 5) == prefix, part, 0.0)
        # behind the second digit most parts hold no member
        if tl.max(part, axis=0) > 0.0:
            mine = (bits & 31)[None, :] == digit[:, None]
            mass += tl.where(mine, part[None, :], 0.0)
    tl.store(after + (row * chunks + chunk) * BINS + digit, tl.sum(mass, axis=1))


@triton.jit
def _apply(
    values,
    sums,
    top_p,
    table,
    prefixes,
    masses,
    size,
    width,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):
    """`values` become probabilities; `table` is that of the last digit."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    rows = tl.num_programs(0)
    chunks = tl.num_programs(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    part = tl.load(values + row * size + place, mask=inside, other=0.0)
    goal, total = _row_goal(sums, top_p, row, chunks, width, CHUNKS)
    prefix = tl.load(prefixes + 5 * rows + row)
    above = tl.load(masses + 5 * rows + row)
    boundary, above = _descended(table, row, chunks, prefix, above, goal, CHUNKS, BINS)
    edge = boundary.to(tl.float32, bitcast=True)
    number = tl.arange(0, CHUNKS)
    equal = tl.load(
        table + (row * chunks + number) * BINS + (boundary & 31), mask=number < chunks, other=0.0
    )
    # n equal floats add up to n times one of them within half of one, for any chunk
    equal = (equal / tl.maximum(edge, 1.1754943508222875e-38) + 0.5).to(tl.int32)
    ahead = tl.sum(tl.where(number < chunk, equal, 0), axis=0)
    need = tl.ceil((goal - above) / tl.maximum(edge, 1.1754943508222875e-38))
    room = tl.minimum(tl.maximum(need, 1.0), 1e9).to(tl.int32)
    bits = part.to(tl.int32, bitcast=True)
    same = bits == boundary
    order = ahead + tl.cumsum(same.to(tl.int32), axis=0)
    kept = (bits > boundary) | (same & (order <= room))
    taken = tl.minimum(room, tl.sum(equal, axis=0)).to(tl.float32)
    whole = tl.load(top_p + row // width) >= 1.0
    mass = tl.where(whole, total, above + taken * edge)
    part = tl.where(whole, part, tl.where(kept, part, 0.0))
    tl.store(values + row * size + place, part / mass, mask=inside)


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor | None) -> Tensor:
    """softmax(logits / temperature), cut to the nucleus and renormalised.

    Args:
        logits: [B, W, V] float32, -inf allowed.
        temperature: [B] float32, above 0.
        top_p: [B] float32 in (0, 1], 1 = off; None = no lane cuts.
    Returns:
        [B, W, V] float32.
    """
    lanes, width, size = logits.shape
    logits = logits.contiguous()
    rows, chunks = lanes * width, triton.cdiv(size, CHUNK)
    shape = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    grid, made = (rows, chunks), logits.new_empty
    maxima, sums = made((rows, chunks)), made((rows, chunks))
    out = torch.empty_like(logits)
    temperature = temperature.contiguous()
    _maxima[grid](logits, maxima, size, CHUNK, num_warps=8)
    _exponentials[grid](logits, temperature, maxima, out, sums, size, width, **shape, num_warps=8)
    if top_p is None:
        _normalise[grid](out, sums, size, **shape, num_warps=8)
        return out
    top_p = top_p.contiguous()
    tables = made((2, rows, chunks, BINS))
    prefixes = made((_PASSES, rows), dtype=torch.int32)
    masses = made((_PASSES, rows))
    found = (prefixes, masses, size, width)
    for number in range(_PASSES):
        before, after = tables[1 - number % 2], tables[number % 2]
        _digits[grid](
            out,
            sums,
            top_p,
            before,
            after,
            *found,
            number,
            **shape,
            BINS=BINS,
            PART=_PART,
            num_warps=8,
        )
    last = tables[(_PASSES - 1) % 2]
    _apply[grid](out, sums, top_p, last, *found, **shape, BINS=BINS, num_warps=8)
    return out

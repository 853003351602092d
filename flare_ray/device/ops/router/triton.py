"""Routing on CUDA: float32 products of few rows, then choice and weights.

    products  grid (rows, pairs of experts): a program multiplies one row by two experts' rows. The
              library's float32 product of one row is slower and wants the row cast first; from
              PRODUCT_ROWS on its tiles win, since this form reads the matrix once a row
    choose    grid (rows,)

One program squashes a row's scores and takes the largest biased one `top_k` times.
The maximum first, then the lowest index that has it, so equal scores go to the lower expert; a
sort would cost several launches for 288 numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PRODUCT_ROWS = 16
"""Most rows of the product's own kernel."""
_EXPERTS = 2
_STEP = 1024


@triton.jit
def _products(x, weight, out, hidden, experts, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """x [R, hidden]; weight [experts, hidden] float32; out [R, experts] float32."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS, STEP), tl.float32)
    for start in range(0, hidden, STEP):
        place = start + tl.arange(0, STEP)
        inside = place < hidden
        values = tl.load(x + row * hidden + place, mask=inside, other=0.0).to(tl.float32)
        matrix = tl.load(
            weight + expert[:, None] * hidden + place[None, :],
            mask=(expert < experts)[:, None] & inside[None, :],
            other=0.0,
        )
        total += matrix * values[None, :]
    tl.store(out + row * experts + expert, tl.sum(total, axis=1), mask=expert < experts)


def products(x: Tensor, weight: Tensor) -> Tensor:
    """Rows [R, H] of any type times weight [E, H] float32 -> [R, E] float32."""
    rows, hidden = x.shape
    experts = weight.shape[0]
    if rows > PRODUCT_ROWS:
        return F.linear(x.to(torch.float32), weight)
    out = weight.new_empty((rows, experts))
    grid = (rows, triton.cdiv(experts, _EXPERTS))
    x = x.contiguous()
    _products[grid](x, weight, out, hidden, experts, _EXPERTS, _STEP, num_warps=4)
    return out


@triton.jit
def _choose(
    products,
    bias,
    chosen,
    weights,
    experts,
    scale,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOT: tl.constexpr,
):
    """products [R, experts] float32; chosen [R, TOP_K] int64. ROOT: sqrt(softplus) scores."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < experts
    raw = tl.load(products + row * experts + place, mask=inside, other=0.0)
    if ROOT:
        score = tl.sqrt(tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0)))))
    else:
        score = 1.0 / (1.0 + tl.exp(-raw))
    left = score + tl.load(bias + place, mask=inside, other=0.0)
    left = tl.where(inside, left, float("-inf"))
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    shares = tl.zeros((SLOTS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        highest = tl.max(left, axis=0)
        best = tl.min(tl.where(left == highest, place, SIZE), axis=0)
        best = tl.minimum(best, experts - 1)
        share = tl.sum(tl.where(place == best, score, 0.0), axis=0)
        ids = tl.where(slot == choice, best, ids)
        shares = tl.where(slot == choice, share, shares)
        left = tl.where(place == best, float("-inf"), left)
    shares = shares / (tl.sum(shares, axis=0) + 1e-20) * scale
    at = row * TOP_K + slot
    tl.store(chosen + at, ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + at, shares, mask=slot < TOP_K)


def choose(
    products: Tensor, bias: Tensor, *, top_k: int, scale: float, scoring: str
) -> tuple[Tensor, Tensor]:
    """Products [R, E] float32 -> (experts [R, top_k] int64, weights [R, top_k] float32)."""
    rows, experts = products.shape
    chosen = torch.empty((rows, top_k), dtype=torch.int64, device=products.device)
    weights = products.new_empty((rows, top_k))
    _choose[(rows,)](
        products.contiguous(),
        bias,
        chosen,
        weights,
        experts,
        scale,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        SIZE=triton.next_power_of_2(experts),
        ROOT=scoring == "sqrt_softplus",
        num_warps=1,
    )
    return chosen, weights

"""Chain verification and inverse-CDF draws over whole vocabularies on CUDA: two launches.

    weigh   grid (lanes, chunks of 4,096): each program repeats the chain's few tests (one
            probability a draft), so all know the row that decides; it leaves its chunk's share of
            that row's weight, p or max(p - q, 0)
    pick    grid (lanes,): finds the chunk that holds u times the total, then the token in it

A lane's own length decides which row is its last and which uniform is drawn from (contract: S9);
the law is `chain.py`'s, decisions bit for bit. Sums have one fixed order. Cumulative weights are
added in another order than torch's, so a draw within a rounding of a boundary may take the
neighbouring token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flare_ray.device.sampling.chain import ChainResult

CHUNK = 4096


@triton.jit
def _accepted(p, q, drafts, length, uniforms, size, DEPTH: tl.constexpr):
    """Drafts that pass, of one lane; pointers at its first row."""
    count = (length * 0).to(tl.int32)
    running = count + 1
    for i in tl.static_range(DEPTH):
        token = tl.load(drafts + i)
        chance = tl.load(uniforms + i) * tl.load(q + i * size + token)
        passed = (chance < tl.load(p + i * size + token)) & (i < length)
        running = running * passed.to(tl.int32)
        count += running
    return count


@triton.jit
def _weights(p, q, row, rejected, place, size):
    """max(p - q, 0) of a rejected draft's row, p of any other."""
    inside = place < size
    weight = tl.load(p + row * size + place, mask=inside, other=0.0)
    less = tl.load(q + row * size + place, mask=inside & rejected, other=0.0)
    return tl.maximum(weight - less, 0.0)


@triton.jit
def _weigh(
    p,
    q,
    drafts,
    lengths,
    uniforms,
    sums,
    accepted,
    p_stride,
    q_stride,
    size,
    DEPTH: tl.constexpr,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """p [B, DEPTH + 1, V] and q [B, DEPTH, V] by lane strides; uniforms [B, DRAWS]."""
    lane = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    own_p = p + lane * p_stride
    own_q = q + lane * q_stride
    length = tl.load(lengths + lane)
    count = _accepted(
        own_p, own_q, drafts + lane * DEPTH, length, uniforms + lane * DRAWS, size, DEPTH
    )
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = _weights(own_p, own_q, count.to(tl.int64), count < length, place, size)
    tl.store(sums + lane * tl.num_programs(1) + chunk, tl.sum(weight, axis=0))
    if chunk == 0:
        tl.store(accepted + lane, count.to(tl.int64))


@triton.jit
def _pick(
    p,
    q,
    drafts,
    lengths,
    uniforms,
    sums,
    accepted,
    p_stride,
    q_stride,
    tokens,
    size,
    chunks,
    DEPTH: tl.constexpr,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(accepted + lane)
    length = tl.load(lengths + lane)
    rejected = row < length
    uniform = tl.load(uniforms + lane * DRAWS + length + rejected.to(tl.int64))
    number = tl.arange(0, CHUNKS)
    mass = tl.load(sums + lane * chunks + number, mask=number < chunks, other=0.0)
    reached = tl.cumsum(mass, axis=0)
    total = tl.max(reached, axis=0)
    below = (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    goal = tl.minimum(uniform * total, below)
    # the first chunk that passes the goal, and only one that holds weight
    chunk = tl.min(tl.where((reached > goal) & (mass > 0), number, CHUNKS), axis=0)
    chunk = tl.minimum(chunk, chunks - 1)
    before = tl.max(tl.where(number < chunk, reached, 0.0), axis=0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    own_p = p + lane * p_stride
    own_q = q + lane * q_stride
    weight = _weights(own_p, own_q, row, rejected, place, size)
    passed = (before + tl.cumsum(weight, axis=0) > goal) & (weight > 0)
    token = tl.min(tl.where(passed, place, size), axis=0)
    # sums of another order may stop just short of the goal: the last token with weight then
    last = tl.max(tl.where(weight > 0, place, 0), axis=0)
    token = tl.where(token < size, token, last).to(tl.int64)
    if rejected & (total <= 0.0):
        # A uniform of exactly 1 rejects even where p == q; the draft itself is the right sample.
        token = tl.load(drafts + lane * DEPTH + row)
    tl.store(tokens + lane, token)


def _lanes(x: Tensor) -> Tensor:
    """[B, W, V] with contiguous rows and any lane stride."""
    return x if x[0].is_contiguous() else x.contiguous()


def verify_chain(
    p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, uniforms: Tensor
) -> ChainResult:
    """See `chain.verify_chain`; D may be 0."""
    lanes, rows, size = p.shape
    depth = rows - 1
    p, uniforms = _lanes(p), uniforms.contiguous()
    q = _lanes(q) if depth else p
    drafts = drafts.contiguous() if depth else lengths
    chunks = triton.cdiv(size, CHUNK)
    sums = p.new_empty((lanes, chunks))
    accepted, tokens = (torch.empty_like(lengths) for _ in range(2))
    shape = {"DEPTH": depth, "DRAWS": uniforms.shape[1], "CHUNK": CHUNK}
    strides = (p.stride(0), q.stride(0))
    operands = (p, q, drafts, lengths.contiguous(), uniforms, sums, accepted, *strides)
    _weigh[(lanes, chunks)](*operands, size, **shape, num_warps=8)
    _pick[(lanes,)](
        *operands,
        tokens,
        size,
        chunks,
        **shape,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return ChainResult(accepted, tokens)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """See `chain.draw`; weights [B, V]."""
    none = torch.zeros((weights.shape[0],), dtype=torch.int64, device=weights.device)
    no_drafts = none.view(-1, 1)[:, :0]
    return verify_chain(
        weights.unsqueeze(1), weights.unsqueeze(1), no_drafts, none, uniforms.unsqueeze(1)
    ).token

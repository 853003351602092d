"""Attention over listed latent rows on CUDA: split and merge, lists on the device.

    attend  grid (rows, head blocks, splits): online softmax in base 2 over a share of the row's
            list; leaves a normalised partial [D] and log2 of its weight per head
    merge   grid (rows, heads): weighs the partials

The list says everything that a planned library call would fix on the host: causality of a
verification row, selection, length, padding (-1). Its length is the captured shape's, its content
may change between replays. A latent is key and value, so it is read once.

Tiles: 16 heads x 32 keys for few rows, 64 heads x 32 keys from eight rows on, so that a latent is
read by one program instead of four; splits fill two waves of 132 multiprocessors. Everything is
counted in 64 bits: a pool of 2 ** 22 pages of 64 latents of 512 exceeds 32-bit offsets.

Source: flash-decoding (Dao et al. 2023); the index list in place of a plan is ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634
_KEYS = 32
_PROGRAMS = 264
_MAX_SPLITS = 32


@triton.jit
def _attend(
    query,
    cache,
    index,
    partial,
    weight,
    count,
    share,
    row_stride,
    head_stride,
    heads,
    scale,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    """query [R, heads, DIM] by strides; index [R, count]; partial [R, splits, heads, DIM]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    real = head < heads
    channel = tl.arange(0, DIM)
    q = tl.load(
        query + row * row_stride + head.to(tl.int64)[:, None] * head_stride + channel[None, :],
        mask=real[:, None],
        other=0.0,
    ).to(cache.dtype.element_ty)
    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    mixed = tl.zeros((BH, DIM), tl.float32)
    for start in range(split * share, min(count, (split + 1) * share), BN):
        place = start + tl.arange(0, BN)
        at = tl.load(index + row * count + place, mask=place < count, other=-1).to(tl.int64)
        seen = at >= 0
        latent = tl.load(
            cache + tl.where(seen, at, 0)[:, None] * DIM + channel[None, :],
            mask=seen[:, None],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(latent), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - higher)
        chance = tl.where(seen[None, :], tl.exp2(score - higher[:, None]), 0.0)
        total = total * fade + tl.sum(chance, axis=1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(chance.to(latent.dtype), latent, mixed, input_precision="ieee")
        top = higher
    base = (row * splits + split) * heads + head
    normed = mixed / tl.maximum(total, 1e-30)[:, None]
    tl.store(partial + base[:, None] * DIM + channel[None, :], normed, mask=real[:, None])
    mass = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), -1e30)
    tl.store(weight + base, mass, mask=real)


@triton.jit
def _merge(partial, weight, out, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """grid (R, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, DIM)
    base = (row * splits + split) * heads + head
    mass = tl.load(weight + base, mask=split < splits, other=-1e30)
    top = tl.max(mass, axis=0)
    share = tl.where(mass > -1e29, tl.exp2(mass - top), 0.0)
    parts = tl.load(
        partial + base[:, None] * DIM + channel[None, :],
        mask=(split < splits)[:, None],
        other=0.0,
    )
    mixed = tl.sum(parts * share[:, None], axis=0) / tl.maximum(tl.sum(share, axis=0), 1e-30)
    tl.store(out + (row * heads + head) * DIM + channel, mixed.to(out.dtype.element_ty))


def fits(query: Tensor, cache: Tensor) -> bool:
    """Whether the kernels take such tensors: latents of 16 to 512 channels, a power of two."""
    dim = cache.shape[1]
    return 16 <= dim <= 512 and dim & (dim - 1) == 0 and query.stride(-1) == 1


def _splits(rows: int, head_blocks: int, count: int) -> int:
    """A power of two: enough programs for two waves, at least two key tiles each."""
    wanted = min(_MAX_SPLITS, _PROGRAMS // (rows * head_blocks), count // (2 * _KEYS))
    return 1 << (max(wanted, 1).bit_length() - 1)


def indexed_attention(query: Tensor, cache: Tensor, index: Tensor, *, scale: float) -> Tensor:
    """See `api.indexed_attention`."""
    rows, heads, dim = query.shape
    count = index.shape[1]
    narrow = cache.element_size() == 4
    wide = rows >= 8 and heads >= 64 and not narrow
    block = 64 if wide else 16
    head_blocks = triton.cdiv(heads, block)
    splits = _splits(rows, head_blocks, count)
    share = triton.cdiv(triton.cdiv(count, splits), _KEYS) * _KEYS
    partial = query.new_empty((rows, splits, heads, dim), dtype=torch.float32)
    weight = query.new_empty((rows, splits, heads), dtype=torch.float32)
    _attend[(rows, head_blocks, splits)](
        query,
        cache,
        index.contiguous(),
        partial,
        weight,
        count,
        share,
        query.stride(0),
        query.stride(1),
        heads,
        scale * _LOG2E,
        DIM=dim,
        BH=block,
        BN=16 if narrow else _KEYS,
        num_warps=8 if wide else 4,
        num_stages=1 if narrow else 2,
    )
    out = query.new_empty((rows, heads, dim), dtype=cache.dtype)
    _merge[(rows, heads)](partial, weight, out, splits, DIM=dim, SPLITS=splits, num_warps=4)
    return out

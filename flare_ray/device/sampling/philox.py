"""Philox4x32-10 in torch: the random stream that CPU and GPU samplers share (contract: S4, S5).

Draw n of key k is word n % 4 of the block with counter (n // 4 as 64 bits, subsequence as 64 bits;
0 but for position-keyed noise), mapped to a float32 in (0, 1] by x * 2**-32 + 2**-33. This is the
law of curand_init(k, 0, n), verified against compiled FlashInfer samplers.

Source: Salmon, Moraes, Dror, Shaw 2011; the float mapping is curand's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SCALE = 2.0**-32
_HALF = 2.0**-33


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """(Weyl steps [10, 2, 1, 1], multipliers [2, 1, 1]) int64, made once per device.

    A captured program may not copy from the host, so the warm-up run must leave them behind.
    """
    step = torch.arange(_ROUNDS, dtype=torch.int64).view(_ROUNDS, 1, 1, 1)
    weyl = torch.tensor(_WEYL, dtype=torch.int64).view(1, 2, 1, 1) * step
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64).view(2, 1, 1)
    return weyl.to(device), multipliers.to(device)


def _round_keys(keys: Tensor, steps: Tensor) -> Tensor:
    """Key schedule [10, 2, B, 1] int64 from keys [B] int64 (low word first)."""
    words = torch.stack((keys & _MASK32, (keys >> 32) & _MASK32)).view(1, 2, -1, 1)
    return (words + steps) & _MASK32


def blocks(keys: Tensor, first: Tensor, count: int, subsequence: Tensor | None = None) -> Tensor:
    """Raw 32-bit words of `count` consecutive Philox blocks.

    Args:
        keys: [B] int64, the 64-bit key read as signed.
        first: [B] int64, first block index (offset // 4), >= 0.
        count: static number of blocks.
        subsequence: [B] int64, >= 0; None = 0.
    Returns:
        [B, 4 * count] int64, each in [0, 2**32).
    """
    steps, multipliers = _constants(keys.device)
    schedule = _round_keys(keys, steps)
    index = first.view(-1, 1) + torch.arange(count, device=keys.device, dtype=torch.int64)
    other = torch.zeros_like(index)
    if subsequence is not None:
        other = other + subsequence.view(-1, 1)
    even = torch.stack((index & _MASK32, other & _MASK32))  # words 0 and 2
    odd = torch.stack(((index >> 32) & _MASK32, (other >> 32) & _MASK32))  # words 1 and 3
    for step in range(_ROUNDS):
        # The product wraps as signed 64-bit; its bit pattern, hence both halves, is still right.
        product = even * multipliers
        high = ((product >> 32) & _MASK32).flip(0)
        even = high ^ odd ^ schedule[step]
        odd = (product & _MASK32).flip(0)
    # word order per block: even[0], odd[0], even[1], odd[1]
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1).flatten(1)


def uniforms(keys: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Draws offset .. offset + count - 1 of each key, subsequence 0.

    Args:
        keys: [B] int64.
        offsets: [B] int64, first draw, >= 0.
        count: static number of draws.
    Returns:
        [B, count] float32 in (0, 1]; exactly 1.0 with probability 2**-25 (see chain.py's guard).
    """
    if keys.device.type == "cpu":
        from flare_ray.device.sampling import numba

        return numba.uniforms(keys, offsets, count)
    from flare_ray.device.sampling.stream import triton

    return triton.uniforms(keys, offsets, count)


def plain_uniforms(keys: Tensor, offsets: Tensor, count: int) -> Tensor:
    """As `uniforms`, in torch's operators."""
    words = blocks(keys, offsets >> 2, (count + 6) // 4)
    column = (offsets & 3).view(-1, 1) + torch.arange(count, device=keys.device)
    return words.gather(1, column).to(torch.float32) * _SCALE + _HALF

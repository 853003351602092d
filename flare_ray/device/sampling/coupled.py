"""Position-keyed draws: the reproducible mode (contract: S8).

Gumbel-max with noise that depends on (request key, row position, token id) alone: token t wins with
probability p(t) where t maximises log p(t) - log E(t), E exponential. Target and drafter use the
same noise at the same position, so a draft is accepted iff it equals the target's own draw, and the
text is the target's draws: drafts, widths, neighbours and preemption cannot change it. Exact as far
as p has the same bits in every shape (float32 products on one machine).

The noise of position P is Philox subsequence P + 1 of the SAMPLE key; the plain mode uses
subsequence 0, so both modes share a key without sharing a draw. Noise is float64 from 32 random
bits: ties have no weight, and tokens down to 1e-9 keep their probability.

Source: Maddison, Tarlow, Minka 2014 (Gumbel-max); the coupling of Leviathan et al. replaced by
equality with the target's draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.sampling.philox import blocks

_WORDS = 4
_SCALE = 2.0**-32


@dataclass(slots=True)
class Coupling:
    """Which lanes draw so, and with what.

    Attributes:
        lanes: [B] bool.
        keys: [B] int64, the SAMPLE keys.
        first: [B] int64, position of the lanes' first row.
        every_lane: static: no lane draws otherwise.
    """

    lanes: Tensor
    keys: Tensor
    first: Tensor
    every_lane: bool = False


def exponentials(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """[R, V] float64 > 0, the noise of every token at rows with keys [R] and positions [R]."""
    count = -(-vocabulary // _WORDS)
    words = blocks(keys, torch.zeros_like(keys), count, positions + 1)[:, :vocabulary]
    return -torch.log((words.to(torch.float64) + 0.5) * _SCALE)


def coupled_draws(
    probs: Tensor, coupling: Coupling, depth: int = 0, *, power: float = 1.0
) -> Tensor:
    """The draw of every row.

    Args:
        probs: [B, W, V] float32.
        depth: static, rows between the lanes' first one and row 0 of `probs`.
        power: static, exponent of the probabilities; 1 draws from them as they are.
    Returns:
        [B, W] int64; meaningful in the coupled lanes.
    """
    if probs.device.type == "cpu":
        from flare_ray.device.sampling import numba

        first = coupling.first + depth if depth else coupling.first
        return numba.draw_rows(probs, coupling.lanes, coupling.keys, first, power=power)
    return reference_draws(probs, coupling, depth, power=power)


def reference_draws(
    probs: Tensor, coupling: Coupling, depth: int = 0, *, power: float = 1.0
) -> Tensor:
    """`coupled_draws` in torch operators, for CUDA and as the kernel's reference."""
    batch, width, vocabulary = probs.shape
    places = torch.arange(depth, depth + width, device=probs.device)
    positions = (coupling.first.unsqueeze(1) + places).flatten()
    keys = coupling.keys.repeat_interleave(width)
    noise = exponentials(keys, positions, vocabulary).view(batch, width, vocabulary)
    return (probs.to(torch.float64).pow(power) / noise).argmax(-1)

"""Rotary positions: adjacent pairs (2i, 2i + 1) of the trailing channels turn by position times
frequency i.

Frequencies may be stretched the YaRN way (Peng et al. 2023): slow ones are divided by `factor`,
fast ones stay, with a linear ramp between two numbers of turns over the original context. Neither
cosines nor logits are scaled besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


@dataclass(frozen=True, slots=True)
class Yarn:
    """factor: context growth; beta_fast, beta_slow: turns that end and begin the stretching."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


def frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """[dim / 2] float32 angles per position."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (theta**steps)
    if yarn is None:
        return plain

    def place(turns: float) -> float:
        return dim * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(place(yarn.beta_fast)), 0)
    high = min(math.ceil(place(yarn.beta_slow)), dim - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def phases(positions: Tensor, rates: Tensor) -> Tensor:
    """Unit complex numbers [R, n] of positions [R] int64 and frequencies [n]."""
    angles = positions.to(torch.float32).unsqueeze(1) * rates
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, phase: Tensor, *, back: bool = False) -> Tensor:
    """Turn the last 2 n channels.

    Args:
        x: [R, D] or [R, H, D].
        phase: [R, n] complex64, see `phases`.
        back: turn by the opposite angle.
    Returns:
        A new tensor of x's shape and type; products in float32.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("phase", phase, x.shape[0], None)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from flare_ray.device.ops.rotary_pairs import numba

        return numba.rotate(x, phase, back=back)
    turned = 2 * phase.shape[1]
    kept, tail = x.split([x.shape[-1] - turned, turned], dim=-1)
    pairs = torch.view_as_complex(tail.to(torch.float32).unflatten(-1, (-1, 2)).contiguous())
    phase = phase.conj() if back else phase
    if x.dim() == 3:
        phase = phase.unsqueeze(1)
    tail = torch.view_as_real(pairs * phase).flatten(-2).to(x.dtype)
    return torch.cat((kept, tail), dim=-1)

"""Rotary positions, half-split: channel i turns with channel i + rotary / 2 (Su et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


@dataclass(slots=True)
class Turns:
    """cos, sin [R, rotary / 2] float32 of R rows."""

    cos: Tensor
    sin: Tensor

    def steps(self, count: int) -> list[Self]:
        """Cut into `count` equal runs of rows."""
        parts = [getattr(self, field.name).chunk(count) for field in fields(self)]
        return [type(self)(*pieces) for pieces in zip(*parts, strict=True)]


class Rotary:
    """Angles by position.

    Args:
        frequencies: [rotary / 2] float32, in radians a token.
    """

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies

    @classmethod
    def of_base(cls, channels: int, theta: float, *, device: torch.device) -> Self:
        """Powers of one base.

        Args:
            channels: rotated channels of a head, even.
            theta: base.
            device: of the positions.
        """
        exponent = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        return cls(theta**-exponent)

    def turns(self, positions: Tensor) -> Turns:
        """Of positions [R] int64."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        return Turns(angles.cos(), angles.sin())


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """Turn the first channels of every head; the rest stays.

    Args:
        x: [R, heads, D].
        turns: of the R rows.
    Returns:
        [R, heads, D] of x's type.
    Raises:
        ContractViolation: rows disagree.
    """
    expect_shape("cos", turns.cos, x.shape[0], None)
    half = turns.cos.shape[1]
    cos, sin = turns.cos.unsqueeze(1), turns.sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)

"""MXFP4: E2M1 codes and one power-of-two scale per 32 consecutive inputs.

A byte holds two codes, the *even* column in its low nibble (as in nvfp4.py). A scale is a biased
exponent, E8M0; every dequantised value is exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.weights.formats.nvfp4 import E2M1_MAX, pack_e2m1, unpack_e2m1
from flare_ray.device.weights.formats.powers import power_of_two_above

GROUP = 32
"""Consecutive inputs of one row that share a scale."""


@dataclass(frozen=True, slots=True)
class Mxfp4Parts:
    """One matrix, or rows or whole groups of columns of one, in MXFP4.

    Attributes:
        packed: [N, K / 2] uint8.
        exponents: [N, K / 32] uint8, biased by 127; 255 is no number.
    """

    packed: Tensor
    exponents: Tensor

    @property
    def scale(self) -> Tensor:
        """[N, K / 32] float32, powers of two."""
        return self.exponents.view(torch.float8_e8m0fnu).to(torch.float32)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`, exact in float32 and bfloat16."""
        groups = unpack_e2m1(self.packed).unflatten(1, (-1, GROUP))
        return (groups * self.scale[..., None]).flatten(1).to(dtype)


def quantise_mxfp4(weight: Tensor) -> Mxfp4Parts:
    """Nearest codes under the smallest power of two that holds each group.

    Args:
        weight: [N, K] float, K a multiple of 32.
    """
    groups = weight.to(torch.float32).unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(-1).clamp(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two_above(amax / E2M1_MAX)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return Mxfp4Parts(pack_e2m1((groups / scale[..., None]).flatten(1)), exponents)

"""NVFP4: E2M1 codes, one E4M3 scale per 16 consecutive inputs, one float32 scale per matrix.

A byte holds two codes, the *even* column in its low nibble. Code bits 0-2 choose a magnitude, bit
3 is the sign. Exports disagree about the matrix scale: one form multiplies by it, the other
divides by it; `Nvfp4Parts` keeps the stored value and says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flare_ray.device.weights.formats.powers import power_of_two_above

GROUP = 16
"""Consecutive inputs of one row that share a block scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of code bits 0-2."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive E4M3 value: a group with any weight at all keeps a scale that is not zero."""

_LOW_THEN_HIGH = torch.tensor(
    [
        [(-1.0 if code & 8 else 1.0) * MAGNITUDES[code & 7] for code in (byte & 15, byte >> 4)]
        for byte in range(256)
    ]
)
# Midpoints between magnitudes. A tie goes to the code with an even last bit, as in IEEE rounding:
# where that is the upper code, the boundary lies one float below the midpoint.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_TIE_GOES_UP = torch.tensor([False, True, False, True, False, True, False])
_BOUNDARIES = torch.where(_TIE_GOES_UP, torch.nextafter(_MIDPOINTS, torch.zeros(())), _MIDPOINTS)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Decoded bytes and boundaries on a device: copied once, so that rounding can be captured."""
    return _LOW_THEN_HIGH.to(device), _BOUNDARIES.to(device)


@dataclass(frozen=True, slots=True)
class Nvfp4Parts:
    """One matrix, or rows or whole groups of columns of one, in NVFP4.

    Attributes:
        packed: [N, K / 2] uint8.
        block_scale: [N, K / 16] float8_e4m3fn.
        global_scale: [] float32, this matrix's own, as stored.
        global_divides: w = code x block_scale / global_scale instead of x global_scale.
        input_scale: [] float32 in the same sense, of activations quantised to NVFP4 (W4A4); None =
            activations stay as they are (W4A16).
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor
    global_divides: bool = False
    input_scale: Tensor | None = None

    @property
    def global_multiplier(self) -> Tensor:
        """[] float32 factor of the whole matrix, for kernels that multiply their accumulator."""
        return self.global_scale.reciprocal() if self.global_divides else self.global_scale

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`.

        Code x block scale has at most six significant bits and is exact in float32; the global
        scale rounds once, and `dtype` once more where it is narrower than float32.
        """
        groups = unpack_e2m1(self.packed).unflatten(1, (-1, GROUP))
        values = (groups * self.block_scale.to(torch.float32)[..., None]).flatten(1)
        scaled = values / self.global_scale if self.global_divides else values * self.global_scale
        return scaled.to(dtype)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[N, K / 2] uint8 -> [N, K] float32 values, low nibble first."""
    table, _ = _tables(packed.device)
    return table[packed.to(torch.int32)].flatten(1)


def pack_e2m1(values: Tensor) -> Tensor:
    """[N, K] float -> [N, K / 2] uint8: nearest codes, ties to the even code, beyond 6 clamped.

    A negative value that rounds to zero keeps its sign bit.
    """
    _, boundaries = _tables(values.device)
    codes = torch.bucketize(values.abs().to(torch.float32), boundaries)
    codes = (codes + 8 * torch.signbit(values)).to(torch.uint8).unflatten(1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4)


def quantise_nvfp4(
    weight: Tensor,
    *,
    global_scale: Tensor | None = None,
    global_divides: bool = False,
    exact: bool = False,
) -> Nvfp4Parts:
    """Nearest NVFP4 form of a matrix with the given or the usual global scale.

    Args:
        weight: [N, K] float, K a multiple of 16.
        global_scale: [] float32 in the sense of `global_divides`; None = the scale that gives the
            largest weight the largest block scale and code.
        global_divides: sense of the stored scale.
        exact: the scale that is chosen here is a power of two, so that dequantised values, of at
            most six significant bits, are exact in bfloat16.
    """
    weight = weight.to(torch.float32)
    if global_scale is None:
        amax = weight.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        unit = amax / (E2M1_MAX * E4M3_MAX)
        unit = power_of_two_above(unit) if exact else unit
        global_scale = unit.reciprocal() if global_divides else unit
    multiplier = global_scale.reciprocal() if global_divides else global_scale
    groups = weight.unflatten(1, (-1, GROUP))
    wanted = groups.abs().amax(-1) / (E2M1_MAX * multiplier)
    wanted = torch.where(wanted > 0, wanted.clamp(E4M3_TINY, E4M3_MAX), wanted)
    block_scale = wanted.to(torch.float8_e4m3fn)
    unit = block_scale.to(torch.float32)[..., None] * multiplier
    scaled = torch.where(unit > 0, groups / unit, torch.zeros_like(groups))
    return Nvfp4Parts(pack_e2m1(scaled.flatten(1)), block_scale, global_scale, global_divides)

"""FP8 with one scale per rectangular block: w = e4m3 value x scale_inv of its block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.weights.formats.powers import power_of_two_above

DEFAULT_BLOCK = (128, 128)
"""Rows and columns that share one scale where a configuration names no block."""
E4M3_MAX = 448.0
"""Largest finite E4M3 value."""


@dataclass(frozen=True, slots=True)
class Fp8BlockParts:
    """One matrix, or a rectangle of one, in block FP8.

    Attributes:
        weight: [N, K] float8_e4m3fn.
        scale_inv: [blocks over rows, blocks over columns] float32, every block that the
            rectangle touches.
        block: rows and columns of a block.
        offset: row and column inside the first block at which the rectangle begins; (0, 0) for a
            whole matrix.
    """

    weight: Tensor
    scale_inv: Tensor
    block: tuple[int, int] = DEFAULT_BLOCK
    offset: tuple[int, int] = (0, 0)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`: the float32 product, rounded once more where `dtype` is narrower."""
        scale = self.scale_inv
        for dim, (block, offset) in enumerate(zip(self.block, self.offset, strict=True)):
            scale = scale.repeat_interleave(block, dim)
            scale = scale.narrow(dim, offset, self.weight.shape[dim])
        return (self.weight.to(torch.float32) * scale).to(dtype)


def quantise_fp8_block(
    weight: Tensor, block: tuple[int, int] = DEFAULT_BLOCK, *, exact: bool = False
) -> Fp8BlockParts:
    """Nearest block-FP8 form of a matrix.

    Args:
        weight: [N, K] float; neither size need be a multiple of its block.
        block: rows and columns that share a scale.
        exact: scales are powers of two, so that dequantised values are exact in bfloat16; else each
            block's largest magnitude becomes 448.
    """
    rows, columns = weight.shape
    high, wide = (-(-size // edge) for size, edge in zip(weight.shape, block, strict=True))
    padded = weight.new_zeros(high * block[0], wide * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(high, block[0], wide, block[1])
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    if exact:
        scale = power_of_two_above(scale)
    scaled = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    packed = scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return Fp8BlockParts(packed.contiguous(), scale, block)

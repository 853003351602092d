"""A constant matrix, kept in the layouts that this device multiplies by fastest.

On CPU in float32 a large matrix is packed once for oneDNN, whose products of a few rows take a
third to a half of MKL's time; its fixed cost of about 14 us per call makes small matrices slower,
so those stay as they are. One or two rows only stream the matrix from memory, which a plain
[in, out] copy does at twice the rate of the packed form; a drafter's steps are such. The arithmetic
is float32 either way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.linear import onednn

PACK_FROM_ELEMENTS = 180_000
"""Smallest matrix worth packing; measured on 2 cores of an AMD EPYC (Zen 4), torch 2.13: at 6 rows
256 x 848 takes 44 us packed and 60 us plain, 256 x 512 takes 30 us either way."""
STREAMED_ROWS = 2
"""Most rows for the plain copy. With the matrix out of cache, 256 x 8192 at 1, 2, 4 rows: 0.5, 0.7,
1.4 ms plain, 0.9, 0.9, 0.7 ms packed (same machine)."""


class Linear:
    """Multiplies rows by a constant matrix.

    Args:
        weight: [out, in]; not to be changed afterwards. Where packed and plain copies replace it,
            it takes up to twice its memory; keep no further reference.
    Attributes:
        in_features / out_features: sizes.
    """

    __slots__ = ("_packed", "_plain", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor) -> None:
        expect_shape("weight", weight, None, None)
        self.out_features, self.in_features = weight.shape
        packs = weight.numel() >= PACK_FROM_ELEMENTS and onednn.can_pack(weight)
        self._packed = onednn.pack(weight) if packs else None
        self._weight = None if packs else weight
        streams = packs and self.out_features >= self.in_features
        self._plain = weight.t().contiguous() if streams else None

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out], of x's type."""
        if self._packed is None:
            return F.linear(x, self._weight)  # type: ignore[arg-type]
        if self._plain is not None and x.shape[0] <= STREAMED_ROWS:
            return torch.mm(x, self._plain)
        return onednn.multiply(x, self._packed)


def concatenated(*weights: Tensor) -> Linear:
    """One `Linear` for several matrices of one input; outputs follow in order."""
    return Linear(torch.cat(weights) if len(weights) > 1 else weights[0])

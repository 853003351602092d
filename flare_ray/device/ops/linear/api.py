"""A constant matrix, kept in the layouts that this device multiplies by fastest.

On CPU in float32 a round multiplies by one to eight rows, and a prefill by many. Few rows go to
`numba`, which reads the matrix once and in half the bytes where it is bfloat16 at heart; more
rows go to oneDNN, for which a large matrix is packed once (its products of many rows take a third
to a half of MKL's time; its fixed cost of about 14 us per call makes small matrices slower, so
those stay plain). The arithmetic is float32 on every path.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.linear import onednn

PACK_FROM_ELEMENTS = 180_000
"""Smallest matrix worth packing; measured on 2 cores of an AMD EPYC (Zen 4), torch 2.13: at 6 rows
256 x 848 takes 44 us packed and 60 us plain, 256 x 512 takes 30 us either way."""
STREAMED_ROWS = 8
"""Most rows to stream for: a round of one lane. With the matrix out of the core's cache, six rows
take 388, 89 and 148 us streamed and 414, 115 and 153 us packed, at 256 -> 8192, 256 -> 1796 and
2048 -> 256; one row 165, 43, 62 and 407, 99, 135 (same machine)."""


def _streams(weight: Tensor) -> ModuleType | None:
    """The module that streams such a matrix, None on other devices and types."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    from flare_ray.device.ops.linear import numba

    return numba


class Linear:
    """Multiplies rows by a constant matrix.

    Args:
        weight: [out, in]; not to be changed afterwards. On CPU in float32 a second layout stands
            beside it, of half or all of its bytes.
        many_rows: it never meets few rows, so only the layout for many is kept.
    Attributes:
        in_features / out_features: sizes.
    """

    __slots__ = ("_packed", "_stored", "_streamed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, *, many_rows: bool = False) -> None:
        expect_shape("weight", weight, None, None)
        self.out_features, self.in_features = weight.shape
        self._streamed = None if many_rows else _streams(weight)
        self._stored = None if self._streamed is None else self._streamed.stored(weight)[0]
        packs = weight.numel() >= PACK_FROM_ELEMENTS and onednn.can_pack(weight)
        self._packed = onednn.pack(weight) if packs else None
        self._weight = None if packs else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out], of x's type."""
        if self._streamed is not None and x.shape[0] <= STREAMED_ROWS:
            return self._streamed.multiply(x, self._stored)
        if self._packed is None:
            return F.linear(x, self._weight)  # type: ignore[arg-type]
        return onednn.multiply(x, self._packed)


class Halves:
    """Two constant matrices of one size, for the two halves of every row.

    Args:
        weights: [2, D, N], inputs first; not to be changed afterwards.
    """

    __slots__ = ("_stored", "_streamed", "_weights")

    def __init__(self, weights: Tensor) -> None:
        expect_shape("weights", weights, 2, None, None)
        self._weights = weights.contiguous()
        self._streamed = _streams(weights)
        self._stored: tuple[Tensor, ...] = ()
        if self._streamed is not None:
            self._stored = self._streamed.stored(*weights.transpose(1, 2))

    def __call__(self, x: Tensor) -> Tensor:
        """[R, 2 D] -> [2, R, N], of x's type."""
        if self._streamed is not None and x.shape[0] <= STREAMED_ROWS:
            halves = zip(x.chunk(2, dim=1), self._stored, strict=True)
            return torch.stack([self._streamed.multiply(half, weight) for half, weight in halves])
        return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), self._weights)


def concatenated(*weights: Tensor) -> Linear:
    """One `Linear` for several matrices of one input; outputs follow in order."""
    return Linear(torch.cat(weights) if len(weights) > 1 else weights[0])

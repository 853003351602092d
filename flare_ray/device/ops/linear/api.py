"""A constant matrix, kept in the layout that this device multiplies by fastest.

On CPU in float32 that is panels (`numba`), whatever the number of rows. Against a dot product per
output one row takes 0.4 to 0.9 of the time, by size, and six rows 0.4 to 0.7; 64 rows take 0.9 of
oneDNN's packed product (Zen 4 core, 256 x 1796: 22, 59, 558 us). Elsewhere it is torch's own
product.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


def _paneled(weight: Tensor) -> ModuleType | None:
    """The module that keeps such a matrix in panels, None on other devices and types."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    from flare_ray.device.ops.linear import numba

    return numba


class Linear:
    """Multiplies rows by a constant matrix.

    Args:
        weight: [out, in]; not to be changed afterwards.
    Attributes:
        in_features / out_features: sizes.
    """

    __slots__ = ("_kept", "_panels", "in_features", "out_features")

    def __init__(self, weight: Tensor) -> None:
        expect_shape("weight", weight, None, None)
        self.out_features, self.in_features = weight.shape
        self._panels = _paneled(weight)
        self._kept = weight if self._panels is None else self._panels.stored(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out], of x's type."""
        if self._panels is None:
            return F.linear(x, self._kept)
        return self._panels.multiply(x, self._kept, self.out_features)


class Halves:
    """Two constant matrices of one size, for the two halves of every row.

    Args:
        weights: [2, D, N], inputs first; not to be changed afterwards.
    """

    __slots__ = ("_kept", "_linears")

    def __init__(self, weights: Tensor) -> None:
        expect_shape("weights", weights, 2, None, None)
        paneled = _paneled(weights) is not None
        self._kept = None if paneled else weights.contiguous()
        self._linears = [Linear(half.t()) for half in weights] if paneled else []

    def __call__(self, x: Tensor) -> Tensor:
        """[R, 2 D] -> [2, R, N], of x's type."""
        if self._kept is None:
            halves = zip(self._linears, x.chunk(2, dim=1), strict=True)
            return torch.stack([linear(half) for linear, half in halves])
        return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), self._kept)


class Parts:
    """A constant matrix for each of several equal parts of a row.

    Args:
        weights: [G, out, in]; not to be changed afterwards.
    Attributes:
        count: G.
    """

    __slots__ = ("_kept", "_panels", "_size", "count")

    def __init__(self, weights: Tensor) -> None:
        expect_shape("weights", weights, None, None, None)
        self.count, self._size, _ = weights.shape
        self._panels = _paneled(weights)
        if self._panels is None:
            self._kept = weights.transpose(1, 2).contiguous()
        else:
            self._kept = self._panels.stored(weights)

    def __call__(self, x: Tensor) -> Tensor:
        """[R, G in] -> [R, G out], of x's type."""
        if self._panels is not None:
            return self._panels.multiply_parts(x, self._kept, self._size)
        parts = torch.bmm(x.unflatten(1, (self.count, -1)).transpose(0, 1), self._kept)
        return parts.transpose(0, 1).flatten(1)


def concatenated(*weights: Tensor) -> Linear:
    """One `Linear` for several matrices of one input; outputs follow in order."""
    return Linear(torch.cat(weights) if len(weights) > 1 else weights[0])

"""RMS norm with a constant weight.

sqrt(mean(x^2) + eps) is hypot(|x|, sqrt(eps * n)) / sqrt(n): two small operators instead of five,
which is what an eager round pays for. In float32 the factor sqrt(n) goes into the weight. On CPU in
float32 and on CUDA one compiled pass does it all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


class RmsNorm:
    """weight * cast(x / sqrt(mean(x^2) + eps)) over the last dimension.

    Args:
        weight: [n], of the type of the rows to come.
        eps: added to the mean square.
    Attributes:
        size: n.
        weight / eps: as given.
    """

    __slots__ = ("_compiled", "_floor", "_root", "_scaled", "eps", "size", "weight")

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        expect_shape("weight", weight, None)
        self.size = weight.shape[0]
        self._root = math.sqrt(self.size)
        self._floor = torch.full(
            (1,), math.sqrt(eps * self.size), dtype=torch.float32, device=weight.device
        )
        self.weight = weight
        exact = weight.dtype == torch.float32
        self._scaled = weight * self._root if exact else None
        self.eps = eps
        self._compiled = None
        if exact and weight.device.type == "cpu":
            from flare_ray.device.ops.rmsnorm import numba

            self.weight = weight.contiguous()
            self._compiled = numba.rmsnorm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> the same shape and type."""
        if self._compiled is not None and x.dim() == 2 and x.dtype == torch.float32:
            return self._compiled(x, self.weight, eps=self.eps)
        if x.is_cuda and x.stride(-1) == 1:
            from flare_ray.device.ops.rmsnorm import triton

            flat = x if x.dim() == 2 else x.reshape(-1, self.size)
            return triton.rmsnorm(flat, self.weight, eps=self.eps).view(x.shape)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        length = torch.hypot(length, self._floor)
        if self._scaled is not None:
            return (x / length).mul_(self._scaled)
        return (x / length * self._root).to(x.dtype) * self.weight

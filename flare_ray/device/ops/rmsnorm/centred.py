"""RMS norm over equal groups of the last dimension; weights are stored as distances from one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.errors import ContractViolation


class CentredRmsNorm:
    """cast(x / sqrt(mean(x^2) + eps) * (1 + weight)), everything inside in float32.

    Args:
        weight: [n], stored as a distance from one.
        eps: added to the mean square.
        groups: equal parts of the last dimension, each normalised by itself.
    Raises:
        ContractViolation: the groups do not divide the weight.
    """

    __slots__ = ("_compiled", "_eps", "_floor", "_groups", "_scaled", "_weight", "size")

    def __init__(self, weight: Tensor, *, eps: float, groups: int = 1) -> None:
        expect_shape("weight", weight, None)
        self.size = weight.shape[0]
        if self.size % groups:
            raise ContractViolation(f"{groups} groups do not divide a norm of {self.size}")
        size = self.size // groups
        self._groups = groups
        self._eps = eps
        self._weight = weight.to(torch.float32).add(1.0)
        self._scaled = (self._weight * math.sqrt(size)).view(groups, size)
        floor = math.sqrt(eps * size)
        self._floor = torch.full((1,), floor, dtype=torch.float32, device=weight.device)
        self._compiled = None
        if weight.device.type == "cpu":
            from flare_ray.device.ops.rmsnorm import numba

            self._compiled = numba.rmsnorm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> the same shape and type."""
        if self._compiled is not None and x.dim() == 2 and x.dtype == torch.float32:
            return self._compiled(x, self._weight, eps=self._eps, groups=self._groups)
        parts = x.unflatten(-1, (self._groups, -1))
        length = torch.linalg.vector_norm(parts, dim=-1, keepdim=True, dtype=torch.float32)
        normed = parts / length.hypot_(self._floor)
        return normed.mul_(self._scaled).flatten(-2).to(x.dtype)

"""Routing with a correction bias that chooses and does not weigh.

A score is sigmoid(x) or sqrt(softplus(x)) of the product with the expert's row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.router import reference

Scoring = Literal["sigmoid", "sqrt_softplus"]

CUDA_EXPERTS = 1024
"""Most experts of the CUDA kernel, whose program holds a row's scores in registers."""


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scale: float,
    scoring: Scoring = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores, weigh them by unbiased ones.

    Args:
        x: [R, H].
        weight: [E, H] float32; the product is float32 whatever x is.
        bias: [E] float32.
        top_k: experts per row; equal scores go to the lower expert.
        scale: factor on the renormalised weights.
        scoring: how products become scores.
    Returns:
        (experts [R, top_k] int64, weights [R, top_k] float32).
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("x", x, None, weight.shape[1])
    expect_shape("bias", bias, weight.shape[0])
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from flare_ray.device.ops.router import numba

        return numba.route(x, weight, bias, top_k=top_k, scale=scale, scoring=scoring)
    if x.is_cuda and weight.shape[0] <= CUDA_EXPERTS:
        from flare_ray.device.ops.router import triton

        products = triton.products(x, weight)
        return triton.choose(products, bias, top_k=top_k, scale=scale, scoring=scoring)
    return reference.route(x, weight, bias, top_k=top_k, scale=scale, scoring=scoring)

"""What comparisons of CUDA kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BFLOAT16_L2 = 6e-3
"""Relative L2 error of a kernel with bfloat16 operands and results against float32 on the same
operands: a result's rounding alone is 1.7e-3, a rounded intermediate adds as much."""
FLOAT32_L2 = 2e-6
"""The same in float32, sums in another order."""


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 error in float64; infinite where `got` is not finite."""
    got, wanted = got.double(), wanted.double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))


def replayed(call: Callable[[], Tensor]) -> Tensor:
    """The result of a captured and replayed call, poisoned in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    result.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    return result

"""A function of fixed shapes as a CUDA graph: a step of this small model is thousands of launches,
which take a host longer than their work takes the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EAGER_CALLS = 3
"""Calls before a capture: regions compile, gradients and optimiser states get their memory."""

Outputs = tuple[Tensor, ...]


class Captured:
    """Calls ``function`` eagerly a few times for every shape of its input, then replays it.

    On a CPU it is always called. Replays of one instance share memory, so that an output is valid
    until the next call.

    Args:
        function: without host synchronisation, changing tensors only in place; takes at most one
            tensor.
        device: where it runs.
    """

    def __init__(self, function: Callable[..., Outputs], device: torch.device) -> None:
        self._function, self._device = function, device
        self._calls: dict[tuple[int, ...], int] = {}
        self._graphs: dict[
            tuple[int, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Outputs]
        ] = {}

    def __call__(self, *inputs: Tensor) -> Outputs:
        """The function's outputs; static memory once captured."""
        if self._device.type != "cuda":
            return self._function(*inputs)
        key = inputs[0].shape if inputs else ()
        if key not in self._graphs:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= EAGER_CALLS:
                return self._eager(inputs)
            self._graphs[key] = self._capture(inputs)
        graph, static, outputs = self._graphs[key]
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return outputs

    def _eager(self, inputs: tuple[Tensor, ...]) -> Outputs:
        """On a stream of its own, as a capture needs it of what came before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outputs = self._function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return outputs

    def _capture(
        self, inputs: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Outputs]:
        static = tuple(torch.empty_like(i) for i in inputs)
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads pin batches meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self._function(*static)
        return graph, static, outputs

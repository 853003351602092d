"""How the demo's matrices are stored, and training on the weights as they will be read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.quantiser import Choice, rounded

SMALLEST_ROWS = 64
"""Matrices of fewer rows (router, beta, index weights) steer and weigh nothing: they stay plain."""


def stored_format(name: str, tensor: Tensor) -> WeightFormat:
    """Format of a published tensor: NVFP4 for routed experts, FP8 blocks for every other matrix of
    at least ``SMALLEST_ROWS`` rows except embedding and head.
    """
    plain = name.startswith("lm_head") or "embed_tokens" in name or not name.endswith(".weight")
    if plain or tensor.dim() != 2 or tensor.shape[0] < SMALLEST_ROWS:
        return WeightFormat.PLAIN
    return WeightFormat.NVFP4_MODELOPT if ".experts." in name else WeightFormat.FP8_BLOCK


def _form(name: str, parameter: Tensor, choice: Choice) -> WeightFormat:
    stacked = ".experts_" in name
    return WeightFormat.NVFP4_MODELOPT if stacked else choice(name, parameter)


@torch.no_grad()
def round_in_place(model: nn.Module, names: list[str], choice: Choice = stored_format) -> None:
    """Make the named parameters what they will read back as.

    Stacked experts are rounded as one matrix, with one global scale: a power of two, it moves no
    value, so that each expert reads back the same with a scale of its own.
    """
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        form = _form(name, parameter, choice)
        if form is not WeightFormat.PLAIN:
            parameter.copy_(rounded(parameter.flatten(0, -2), form).view_as(parameter))


class StoredView:
    """Lets the named parameters hold their rounded values for the length of a step.

    Gradients are then taken at the rounded values for the unrounded ones: the straight-through
    estimate. On a GPU rounding is captured when the view is made, since its thousands of small
    operators would take as long as the step itself.

    Args:
        model: its parameters keep their memory from here on.
        names: what to round; parameters that are stored plainly are left alone.
        choice: form by name.
    """

    def __init__(self, model: nn.Module, names: list[str], choice: Choice = stored_format) -> None:
        parameters = dict(model.named_parameters())
        plain = WeightFormat.PLAIN
        self._model, self._choice = model, choice
        self._names = [n for n in names if _form(n, parameters[n], choice) is not plain]
        self._weights = [parameters[n].detach() for n in self._names]
        self._kept = [torch.empty_like(w) for w in self._weights]
        self._graph = None
        if self._weights and self._weights[0].is_cuda:
            self._graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._round()
            self._restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads pin batches meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._round()
        return graph

    def _round(self) -> None:
        torch._foreach_copy_(self._kept, self._weights)
        round_in_place(self._model, self._names, self._choice)

    def _restore(self) -> None:
        torch._foreach_copy_(self._weights, self._kept)

    @contextmanager
    def seen(self, active: bool = True) -> Iterator[None]:
        """While open, the parameters hold their rounded values; afterwards their own again."""
        if not (active and self._weights):
            yield
            return
        if self._graph is None:
            self._round()
        else:
            self._graph.replay()
        try:
            yield
        finally:
            self._restore()

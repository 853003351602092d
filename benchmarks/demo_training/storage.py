"""How the demo's matrices are stored, and training on the weights as they will be read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.quantiser import rounded

from .network import DemoModel

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


def _form(name: str, parameter: Tensor) -> WeightFormat:
    stacked = ".experts_" in name
    return WeightFormat.NVFP4_MODELOPT if stacked else stored_format(name, parameter)


@torch.no_grad()
def round_in_place(model: DemoModel, names: list[str]) -> None:
    """Make the named parameters what they will read back as.

    Stacked experts are rounded as one matrix, with one global scale: a power of two, it moves no
    value, so that each expert reads back the same with a scale of its own.
    """
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        form = _form(name, parameter)
        if form is not WeightFormat.PLAIN:
            parameter.copy_(rounded(parameter.flatten(0, -2), form).view_as(parameter))


@contextmanager
def seen_as_stored(model: DemoModel, names: list[str], active: bool) -> Iterator[None]:
    """While open, the named parameters hold their rounded values; afterwards their own again.

    A backward pass inside computes gradients at the rounded values for the unrounded ones: the
    straight-through estimate.
    """
    if not active:
        yield
        return
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in names}
    round_in_place(model, names)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)

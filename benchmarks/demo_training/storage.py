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


def round_parameter(name: str, parameter: Tensor, experts: int) -> None:
    """Round one parameter of the training model in place; every stacked expert keeps a scale of its
    own.
    """
    if ".experts_" not in name:
        parameter.copy_(rounded(parameter, stored_format(name, parameter)))
        return
    for expert in parameter if parameter.dim() == 3 else parameter.unflatten(0, (experts, -1)):
        expert.copy_(rounded(expert, WeightFormat.NVFP4_MODELOPT))


@torch.no_grad()
def round_in_place(model: DemoModel, names: list[str]) -> None:
    """Make the named parameters what they will read back as."""
    parameters = dict(model.named_parameters())
    for name in names:
        round_parameter(name, parameters[name], model.config["n_routed_experts"])


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

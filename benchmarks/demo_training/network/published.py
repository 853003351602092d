"""Conversion between the training model's names and the published checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .model import DemoModel

PREFIX = "model.language_model."
F32_SUFFIXES = ("_base", "_scale", "dt_bias", "A_log", "e_score_correction_bias")
"""Tensors that the published checkpoint keeps in float32."""


def _named(model: DemoModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))


def _published_name(model: DemoModel, name: str) -> str:
    if name == "lm_head.weight":
        return name
    if name.startswith("mtp."):
        name = name.replace("mtp.", f"layers.{model.config['num_hidden_layers']}.", 1)
    return PREFIX + name


def _expert_names(model: DemoModel, name: str) -> list[str] | None:
    base, found, which = _published_name(model, name).rpartition(".experts_")
    if not found:
        return None
    count = model.config["n_routed_experts"]
    return [f"{base}.experts.{e}.{which}_proj.weight" for e in range(count)]


def to_published(model: DemoModel) -> dict[str, Tensor]:
    """Copies of all tensors under published names, on the CPU, bfloat16 except the float32 ones."""
    out: dict[str, Tensor] = {}
    for name, tensor in _named(model):
        tensor = tensor.detach().cpu()
        experts = _expert_names(model, name)
        if experts:
            parts = tensor.view(len(experts), -1, tensor.shape[-1])
            out |= dict(zip(experts, parts.unbind(0), strict=True))
        else:
            out[_published_name(model, name)] = tensor
    return {
        n: (t.float() if n.endswith(F32_SUFFIXES) else t.bfloat16()).contiguous().clone()
        for n, t in out.items()
    }


def is_drafter(model: DemoModel, name: str) -> bool:
    """Whether a published tensor belongs to the MTP layer."""
    return name.startswith(f"{PREFIX}layers.{model.config['num_hidden_layers']}.")


def from_published(model: DemoModel, tensors: dict[str, Tensor]) -> DemoModel:
    """Load published tensors into the model, in place.

    Raises:
        KeyError: naming the first tensor that is missing.
    """
    with torch.no_grad():
        for name, own in _named(model):
            experts = _expert_names(model, name)
            if experts:
                own.copy_(torch.stack([tensors[n] for n in experts]).view_as(own))
            else:
                own.copy_(tensors[_published_name(model, name)])
    return model

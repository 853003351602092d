"""Conversion between the training model's names and the published checkpoint's."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import QwenModel

PREFIX = "model.language_model."
F32_SUFFIXES = ("dt_bias", "A_log")
"""Tensors that stay float32: a decay's logarithm in bfloat16 is another decay."""
TABLE = ".ngram_embedding"
HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _published_name(name: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.")) else PREFIX + name


def _part_names(model: QwenModel, name: str) -> list[str] | None:
    """Names of the tensors that a stacked parameter is stored as, in its order; None = one."""
    if name.endswith(TABLE):
        count = model.config["split_ngram_parts"]
        return [f"{_published_name(name)}.shard_{i}.weight" for i in range(count)]
    base, found, which = _published_name(name).rpartition(".experts_")
    if not found:
        return None
    return [f"{base}.experts.{e}.{which}_proj.weight" for e in range(model.num_experts)]


def to_published(model: QwenModel) -> dict[str, Tensor]:
    """Copies of all tensors under published names, on the CPU, bfloat16 except the float32 ones and
    the integers of the hash.
    """
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor, names = parameter.detach().cpu(), _part_names(model, name)
        if names:
            parts = tensor.view(len(names), -1, tensor.shape[-1])
            out |= dict(zip(names, parts.unbind(0), strict=True))
        else:
            out[_published_name(name)] = tensor
    out = {n: t.float() if n.endswith(F32_SUFFIXES) else t.bfloat16() for n, t in out.items()}
    for name, buffer in model.named_buffers():
        if name.endswith(HASH_BUFFERS):
            out[_published_name(name)] = buffer.cpu()
    return {n: t.contiguous().clone() for n, t in out.items()}


def is_drafter(model: QwenModel, name: str) -> bool:
    """Whether a published tensor belongs to the MTP layer."""
    return name.startswith("mtp.")


def from_published(model: QwenModel, tensors: dict[str, Tensor]) -> QwenModel:
    """Load published tensors into the model, in place.

    Raises:
        KeyError: naming the first tensor that is missing.
        ValueError: if stored constants of the hash are not those of the configuration.
    """
    with torch.no_grad():
        for name, own in model.named_parameters():
            names = _part_names(model, name)
            if names:
                own.copy_(torch.stack([tensors[n] for n in names]).view_as(own))
            else:
                own.copy_(tensors[_published_name(name)])
    for name, buffer in model.named_buffers():
        if name.endswith(HASH_BUFFERS):
            published = _published_name(name)
            if not torch.equal(tensors[published].cpu(), buffer.cpu()):
                raise ValueError(f"{published} is not what the configuration asks for")
    return model

"""Softmax routing: the best experts share a weight of one."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_route(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable experts of each row, weighted to a sum of one.

    Args:
        logits: [R, E] float32.
        top_k: experts per row; equal probabilities go to the lower expert.
    Returns:
        (experts [R, top_k] int64, weights [R, top_k] float32).
    """
    probabilities = torch.softmax(logits, dim=-1)
    weights, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights = weights[:, :top_k]
    return order[:, :top_k], weights / weights.sum(-1, keepdim=True)

"""Routing with a bias that chooses and does not weigh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scale: float,
    scoring: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """See `api.route`. A stable sort keeps the lower expert first among equal scores."""
    products = F.linear(x.to(torch.float32), weight)
    scores = F.softplus(products).sqrt_() if scoring == "sqrt_softplus" else products.sigmoid_()
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    chosen = order[:, :top_k]
    weights = scores.gather(1, chosen)
    return chosen, weights.div_(weights.sum(-1, keepdim=True).add_(1e-20)).mul_(scale)

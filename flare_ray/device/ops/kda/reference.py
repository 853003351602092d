"""The delta rule row by row: the definition, which both faster forms are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6


def normalised(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def delta_rule(
    qkv: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run T rows from one state.

        S = exp(log_decay) * S;  d = beta * (v - S^T k);  S = S + k d^T;  o = S^T q

    Args:
        qkv: [B, T, 3, H, D] float32, before normalisation.
        log_decay: [B, T, H, D], not positive.
        beta: [B, T, H].
        state: [B, H, D, D], key dimension first.
    Returns:
        (o [B, T, H, D], state after every row [B, T, H, D, D]).
    """
    q, k, v = qkv.unbind(2)
    q, k = normalised(q) * q.shape[-1] ** -0.5, normalised(k)
    outputs, states = [], []
    for t in range(qkv.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-1)
        seen = (state * k[:, t].unsqueeze(-1)).sum(-2)
        delta = (v[:, t] - seen) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)

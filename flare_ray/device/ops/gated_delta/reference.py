"""The gated delta rule row by row: the definition, which the faster forms are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Hk key heads of dk channels, Hv value heads of dv; value head v reads key head v // (Hv /
    Hk)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of one state, key dimension first."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(slots=True)
class GatedRows:
    """Inputs of B lanes of T rows, float32.

    Attributes:
        mixed: [B, T, channels] q, k, v after the short convolution, not yet normalised.
        log_decay: [B, T, Hv], not positive.
        beta: [B, T, Hv], in (0, 1).
    """

    mixed: Tensor
    log_decay: Tensor
    beta: Tensor


def queries_keys_values(mixed: Tensor, heads: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised q (times dk^-0.5) and k [B, T, Hk, dk], and v [B, T, Hv, dv]."""
    width = heads.key_heads * heads.key_dim
    q, k, v = mixed.split([width, width, heads.value_heads * heads.value_dim], dim=-1)
    q, k = (_normalised(part.unflatten(-1, (heads.key_heads, -1))) for part in (q, k))
    return q * heads.key_dim**-0.5, k, v.unflatten(-1, (heads.value_heads, -1))


def _normalised(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def gated_delta_rule(rows: GatedRows, state: Tensor, heads: HeadShape) -> tuple[Tensor, Tensor]:
    """Run T rows from one state.

        S = exp(log_decay) * S;  d = beta * (v - S^T k);  S = S + k d^T;  o = S^T q

    Args:
        rows: of B lanes.
        state: [B, Hv, dk, dv].
    Returns:
        (o [B, T, Hv, dv], state after every row [B, T, Hv, dk, dv]).
    """
    output, states, _ = traced_rule(rows, state, heads)
    return output, torch.stack(states, 1)


def traced_rule(
    rows: GatedRows, state: Tensor, heads: HeadShape
) -> tuple[Tensor, list[Tensor], Tensor]:
    """As `gated_delta_rule`, with the corrections d [B, T, Hv, dv]."""
    q, k, v = queries_keys_values(rows.mixed, heads)
    share = heads.value_heads // heads.key_heads
    q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
    decay = rows.log_decay.exp()
    outputs, states, deltas = [], [], []
    for t in range(rows.beta.shape[1]):
        state = state * decay[:, t, :, None, None]
        seen = (state * k[:, t].unsqueeze(-1)).sum(-2)
        delta = (v[:, t] - seen) * rows.beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(state)
        deltas.append(delta)
    return torch.stack(outputs, 1), states, torch.stack(deltas, 1)

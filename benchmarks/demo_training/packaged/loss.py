"""The drafter's loss at every depth, with its gradient taken at once, a few rows at a time: logits
of a large vocabulary are never kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8192
"""Rows whose logits exist at a time."""
SOFT, OVERLAP = 0.5, 1.0
"""Weights of the cross-entropy towards the target's distribution and of the total variation, which
is what acceptance loses."""


class Aim(NamedTuple):
    """What rows are trained towards.

    Attributes:
        states: [N, H] of the target, from which its distribution of the same token follows.
        head: [V, H] whole head.
        tokens: [D] that the drafter may propose.
        weights: [K] of the depths.
    """

    states: Tensor
    head: Tensor
    tokens: Tensor
    weights: Tensor


class DraftLoss(torch.autograd.Function):
    """Mean loss of outputs [K, N, H]; the second result is the overlap [K] of the distributions,
    the expected acceptance where the chain so far is right.
    """

    @staticmethod
    def forward(ctx: Any, outs: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        """See the class; the target's mass outside the drafted tokens cannot be reached."""
        depths, rows, _ = outs.shape
        head = aim.head.index_select(0, aim.tokens)
        gradient = torch.empty_like(outs)
        loss, overlap = outs.new_zeros(depths, dtype=torch.float32), []
        for start in range(0, rows, CHUNK):
            part = slice(start, start + CHUNK)
            p = _target(aim, aim.states[part])
            overlaps = []
            for k in range(depths):
                value, met, slope = _draft(outs[k, part], head, p)
                gradient[k, part] = slope * (aim.weights[k] / rows)
                loss[k] += value
                overlaps.append(met)
            overlap.append(torch.stack(overlaps))
        ctx.save_for_backward(gradient)
        return loss.dot(aim.weights) / rows, torch.stack(overlap).sum(0) / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Scales what was taken in front."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None


def _target(aim: Aim, states: Tensor) -> Tensor:
    """[n, D] float32 probabilities of the drafted tokens among all."""
    logits = F.linear(states, aim.head)
    total = torch.logsumexp(logits.float(), -1, keepdim=True)
    return (logits.index_select(-1, aim.tokens).float() - total).exp_()


def _draft(out: Tensor, head: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, summed overlap and the loss's gradient [n, H] of rows [n, H]."""
    log_q = torch.log_softmax(F.linear(out, head.to(out.dtype)).float(), -1)
    soft = -(p * log_q).sum(-1)
    q = log_q.exp_()
    met = torch.minimum(p, q).sum(-1)
    below = (q < p).float()
    inside = (q * below).sum(-1, keepdim=True)
    slope = SOFT * (q * p.sum(-1, keepdim=True) - p) - OVERLAP * q * (below - inside)
    value = SOFT * soft + OVERLAP * (1 - met)
    return value.sum(), met.sum(), F.linear(slope.to(out.dtype), head.to(out.dtype).T)

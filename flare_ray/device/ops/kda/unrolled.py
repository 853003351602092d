"""Few rows at once, keeping the state after each (contract: M2).

With G the running sum of log decays and D[i, j] = exp(G_i - G_j) for j <= i, never above one,

    seen_i = (k_i e^G_i)^T S_0 + sum over j < i of (k_i D[i, j] . k_j) d_j
    d      = solution of (I + beta tril(k D k, -1)) d = beta (v - (k e^G) S_0)
    o_i    = (q_i e^G_i)^T S_0 + sum over j <= i of (q_i D[i, j] . k_j) d_j
    S_i    = e^G_i S_0 + sum over j <= i of (k_j D[i, j]) d_j^T

so S_0 is read once for all rows and every S_i is written once, instead of six passes over the
state per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.kda.reference import L2_EPS


def queries_and_keys(qkv: Tensor) -> Tensor:
    """[B, T, 3, H, D] -> normalised q (times D^-0.5) and k, [B, T, H, 2, D] contiguous."""
    batch, width, _, heads, dim = qkv.shape
    raw = qkv[:, :, :2]
    length = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
    length.square_().add_(L2_EPS)
    length[:, :, 0].mul_(dim)
    length.sqrt_()
    result = raw.new_empty((batch, width, heads, 2, dim))
    torch.div(raw.transpose(2, 3), length.transpose(2, 3), out=result)
    return result


def run(
    qkv: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, later: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.delta_rule`.

    Args:
        later: [T, 1, T, 1] bool, True where the second row lies after the first.
    """
    batch, width, heads, dim = log_decay.shape
    qk = queries_and_keys(qkv)
    total = log_decay.cumsum(1)
    decay = total.exp()

    lead = qk.new_empty((batch, heads, width, 2, dim))
    torch.mul(qk.transpose(1, 2), decay.transpose(1, 2).unsqueeze(3), out=lead)
    from_state = torch.bmm(
        lead.view(batch * heads, width * 2, dim), state.view(batch * heads, dim, dim)
    ).view(batch, heads, width, 2, dim)

    pair = qk[:, :, :, 1:]
    if width > 1:
        keys = qk[:, :, :, 1].transpose(1, 2).unsqueeze(1)
        pair = qk.new_empty((batch, width, heads, width, dim))
        torch.sub(total.unsqueeze(3), total.transpose(1, 2).unsqueeze(1), out=pair)
        pair.masked_fill_(later, float("-inf")).exp_().mul_(keys)
    rows = batch * width * heads
    pair = pair.reshape(rows, width, dim).transpose(1, 2)
    products = torch.bmm(qk.view(rows, 2, dim), pair).view(batch, width, heads, 2, width)
    products = products.transpose(1, 2)

    beta = beta.transpose(1, 2).unsqueeze(3)
    delta = (qkv[:, :, 2].transpose(1, 2) - from_state[:, :, :, 1]).mul_(beta)
    if width > 1:
        coupling = products[:, :, :, 1] * beta
        delta = torch.linalg.solve_triangular(coupling, delta, upper=False, unitriangular=True)
    output = torch.baddbmm(
        from_state[:, :, :, 0].flatten(0, 1),
        products[:, :, :, 0].reshape(batch * heads, width, width),
        delta.reshape(batch * heads, width, dim),
    ).view(batch, heads, width, dim)

    states = decay.unsqueeze(-1) * state.unsqueeze(1)
    spread = delta.unsqueeze(1).expand(batch, width, heads, width, dim)
    states.view(rows, dim, dim).baddbmm_(pair, spread.reshape(rows, width, dim))
    return output.transpose(1, 2), states

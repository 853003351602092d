"""Few rows at once, keeping the state after each (contract: M2).

With G the running sum of log decays,

    d   = solution of (I + beta tril(k e^G . k e^-G, -1)) d = beta (v - (k e^G)^T S_0)
    o_i = (q_i e^G_i)^T S_0 + sum over j <= i of (q_i e^G_i . k_j e^-G_j) d_j
    S_i = e^log_decay_i S_(i-1) + k_i d_i^T

so S_0 is read once for all rows' outputs, and the state itself is carried in one buffer that stays
in a core's cache: two passes and one write per row.

e^-G must stay inside float32's range: rows times the decay bound are limited to MAX_EXPONENT.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.kda.reference import L2_EPS
from flare_ray.device.ops.state_rows.api import scatter_rows

MAX_EXPONENT = 80.0
"""exp(80) = 6e34 leaves room for a sum of 1,000 such terms in float32."""


def queries_and_keys(qkv: Tensor) -> Tensor:
    """[B, T, 3, H, D] -> normalised q (times D^-0.5) and k, [B, H, T, 2, D] contiguous."""
    batch, width, _, heads, dim = qkv.shape
    raw = qkv[:, :, :2]
    length = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
    length.square_().add_(L2_EPS)
    length[:, :, 0].mul_(dim)
    length.sqrt_()
    result = raw.new_empty((batch, heads, width, 2, dim))
    torch.div(raw, length, out=result.permute(0, 2, 3, 1, 4))
    return result


def run(
    qkv: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, saved: Tensor, write: Tensor
) -> Tensor:
    """As `reference.delta_rule`, but writes each row's state and returns the outputs only.

    Args:
        state: [B, H, D, D] the lanes' own copy; becomes the last state.
        saved: [M, H, D, D], written in place.
        write: [B, T] int64 rows of `saved`.
    """
    batch, width, heads, dim = log_decay.shape
    lanes = batch * heads
    qk = queries_and_keys(qkv)
    keys, values = qk[:, :, :, 1], qkv[:, :, 2].transpose(1, 2)
    beta = beta.transpose(1, 2).unsqueeze(3)
    decay = log_decay.exp() if width > 1 else None
    total = log_decay.cumsum(1).exp_().transpose(1, 2)

    lead = torch.mul(qk, total.unsqueeze(3)).view(lanes, 2 * width, dim)
    from_state = torch.bmm(lead, state.view(lanes, dim, dim)).view(batch, heads, width, 2, dim)
    behind = torch.div(keys, total).view(lanes, width, dim).transpose(1, 2)
    products = torch.bmm(lead, behind).view(batch, heads, width, 2, width)

    delta = (values - from_state[:, :, :, 1]).mul_(beta)
    if width > 1:
        coupling = products[:, :, :, 1] * beta
        delta = torch.linalg.solve_triangular(coupling, delta, upper=False, unitriangular=True)
        # The solver returns columns side by side; the state's update needs rows, six times faster.
        delta = delta.contiguous()
    output = torch.baddbmm(
        from_state[:, :, :, 0].flatten(0, 1),
        products[:, :, :, 0].tril().view(lanes, width, width),
        delta.view(lanes, width, dim),
    ).view(batch, heads, width, dim)

    for row in range(width):
        fade = total[:, :, 0] if decay is None else decay[:, row]
        state.mul_(fade.unsqueeze(3))
        state.addcmul_(keys[:, :, row].unsqueeze(3), delta[:, :, row].unsqueeze(2))
        scatter_rows(saved, write[:, row], state)
    return output.transpose(1, 2)

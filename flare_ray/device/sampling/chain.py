"""Chain verification and single draws: speculative sampling's acceptance law, batched and
length-aware.

Words: a lane *offers* L drafts d_0 .. d_{L-1}, each drawn from its kept q_i. Draft i is accepted
iff u_i * q_i(d_i) < p_i(d_i) with a fresh uniform. The first failure ends the run and the
*correction token* comes from max(p - q, 0) at that row; if all L pass, the *bonus token* comes
from p_L. Emitted tokens are then distributed exactly as sampling from p row by row.

Draw accounting follows FlashInfer's chain kernel (contract: S5): test i uses draw i; after a
rejection the kernel re-tests the remaining L - i drafts, so the final draw is number L + 1, and
number L when all were accepted.

Padding q or masking rows of a fixed-length call would bias a lane with fewer drafts; here each
lane's own length decides which row is its last (contract: S9).

Source: Leviathan, Kalman, Matias 2023; Chen et al. 2023; draw order from flashinfer.sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flare_ray.device.ops.state_rows.api import row_at


class ChainResult(NamedTuple):
    """accepted: [B] int64, a; token: [B] int64, the correction or bonus token that follows them."""

    accepted: Tensor
    token: Tensor


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw over ascending token id.

    Args:
        weights: [B, V] float32, >= 0, not necessarily normalised.
        uniforms: [B] float32 in (0, 1].
    Returns:
        [B] int64: the first id whose cumulative weight exceeds u * total; with u = 1 the last id
        that raised it. A row without any weight gives the last id; callers guard it.
    """
    if weights.is_cuda:
        from flare_ray.device.sampling.inverse_cdf import triton

        return triton.draw(weights, uniforms)
    if weights.dtype != torch.float32:
        return reference_draw(weights, uniforms)
    from flare_ray.device.sampling import numba

    return numba.draw(weights, uniforms)


def reference_draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`draw` in torch operators: the kernels' reference."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Below the total by at least one float, so that some id's cumulative weight exceeds it.
    goal = torch.minimum(uniforms.unsqueeze(-1) * total, torch.nextafter(total, total * 0.0))
    index = torch.searchsorted(cumulative, goal, right=True).squeeze(-1)
    return index.clamp_(max=weights.shape[-1] - 1)


def verify_chain(
    p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, uniforms: Tensor
) -> ChainResult:
    """Accept a prefix of each lane's drafts and draw the token that follows it.

    Args:
        p: [B, D + 1, V] float32, target distribution of every row.
        q: [B, D, V] float32, distribution each draft was drawn from (a point mass for copies).
        drafts: [B, D] int64.
        lengths: [B] int64, drafts this lane offers, 0 .. D.
        uniforms: [B, D + 2] float32, draws 0 .. D + 1 of the lane's ACCEPT stream (draw 0 of
            SAMPLE where length is 0).
    Returns:
        ChainResult; 0 <= accepted <= lengths.
    """
    if p.is_cuda:
        from flare_ray.device.sampling.inverse_cdf import triton

        return triton.verify_chain(p, q, drafts, lengths, uniforms)
    if drafts.shape[1] and p.dtype == torch.float32:
        from flare_ray.device.sampling import numba

        return ChainResult(*numba.verify_chain(p, q, drafts, lengths, uniforms))
    return reference_chain(p, q, drafts, lengths, uniforms)


def reference_chain(
    p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, uniforms: Tensor
) -> ChainResult:
    """`verify_chain` in torch operators: the kernels' reference."""
    depth = drafts.shape[1]
    if depth == 0:
        zero = torch.zeros_like(lengths)
        return ChainResult(zero, draw(p[:, 0], uniforms[:, 0]))
    p_draft = p[:, :depth].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q_draft = q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    offered = torch.arange(depth, device=p.device) < lengths.unsqueeze(-1)
    passed = (uniforms[:, :depth] * q_draft < p_draft) & offered
    accepted = passed.to(torch.int64).cumprod(-1).sum(-1)

    rejected = accepted < lengths
    stop = accepted.clamp(max=depth - 1)
    p_row, q_row = row_at(p, accepted), row_at(q, stop)
    residual = (p_row - torch.where(rejected.unsqueeze(-1), q_row, 0.0)).clamp_(min=0.0)
    final = uniforms.gather(1, (lengths + rejected).unsqueeze(-1)).squeeze(-1)
    token = draw(residual, final)
    # A uniform of exactly 1.0 rejects even where p == q; nothing is left to draw from then, and
    # the draft itself is the right sample (2**-25 per test; undefined in the library's kernel).
    empty = rejected & (residual.sum(-1) <= 0.0)
    return ChainResult(accepted, torch.where(empty, row_at(drafts, stop), token))

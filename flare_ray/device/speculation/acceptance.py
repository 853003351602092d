"""From verified logits to accepted drafts and the target sample (contract: S1, S2, S9, K1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.sampling.chain import draw, verify_chain
from flare_ray.device.sampling.coupled import Coupling, coupled_draws
from flare_ray.device.sampling.filters import FilterParams, target_probs
from flare_ray.device.speculation.inputs import FilterBounds
from flare_ray.device.speculation.lanes import Draws


@dataclass(slots=True)
class Verdict:
    """Outcome of verification, before clipping.

    Attributes:
        accepted: [B] int64, a.
        tokens: [B, W] int64: accepted drafts, then the target sample at index a; undefined after.
        healthy: [B] bool: every verified row's logits had a finite maximum.
        scored: [B, W, V] float32, what log-probabilities are taken from.
        exhausted: [B] bool: unhealthy only because bans and mask leave row 0 no token; None where
            that cannot be.
    """

    accepted: Tensor
    tokens: Tensor
    healthy: Tensor
    scored: Tensor
    exhausted: Tensor | None = None


@dataclass(slots=True)
class RowHealth:
    """Whether rows can be sampled from.

    Attributes:
        healthy: [B] bool, as in `Verdict`.
        exhausted: [B] bool or None, as in `Verdict`.
        usable: [B] int64, most drafts to count as accepted: where the first row without a token is
            reached, the draft in front of it is the round's last token, in its sample's place.
            None = no row is without one.
    """

    healthy: Tensor
    exhausted: Tensor | None = None
    usable: Tensor | None = None


def row_health(logits: Tensor, valid: Tensor, *, may_exhaust: bool) -> RowHealth:
    """Look at every row's largest logit.

    A row that bans and mask leave no token is no fault of the model. Behind drafts it only ends
    what the round emits, as width one would meet it only after emitting them; in front, the lane
    has no token left.

    Args:
        logits: [B, W, V] float32, masked; NaN and +inf are the model's faults. Changed where
            `may_exhaust`: rows without a token get token 0, so that nothing NaN comes of them.
        valid: [B, W] bool.
        may_exhaust: host-known: rows without a token are possible.
    """
    highest = logits.amax(-1)
    finite = highest.abs() < float("inf")  # NaN is not below it
    if not may_exhaust:
        return RowHealth((finite | ~valid).all(-1))
    empty = torch.isneginf(highest)
    rows = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(empty & valid, rows, logits.shape[1]).amin(1)
    exhausted = first == 0
    healthy = (finite | empty | ~valid).all(-1) & ~exhausted
    logits[..., 0].masked_fill_(empty, 0.0)
    return RowHealth(healthy, exhausted, (first - 1).clamp_(min=0))


def accept_chain(
    logits: Tensor,
    q: Tensor,
    drafts: Tensor,
    offered: Tensor,
    *,
    params: FilterParams,
    draws: Draws,
) -> Verdict:
    """Verify the offered prefix of each lane's drafts.

    Args:
        logits: [B, W, V] float32, masked.
        q: [B, W - 1, V] float32; drafts: [B, W - 1] int64.
        offered: [B] int64, drafts this lane verifies; a lane with none draws from SAMPLE.
    Returns:
        Verdict without health and scores: `healthy` is all True, `scored` the logits here.
    """
    p = target_probs(logits, params)
    width, coupling = logits.shape[1], draws.coupling
    if coupling is None or not coupling.every_lane:
        none_offered = (offered == 0).unsqueeze(1)
        uniforms = torch.where(none_offered, draws.sample, draws.accept)
        accepted, token = verify_chain(p, q, drafts, offered, uniforms[:, : width + 1])
    if coupling is not None:
        # The text is the target's own draws; drafts only say how many of them are known already.
        own = coupled_draws(p, coupling)
        equal = drafts == own[:, :-1]
        equal &= torch.arange(width - 1, device=p.device) < offered.unsqueeze(1)
        count = equal.to(torch.int64).cumprod(-1).sum(-1)
        last = own.gather(1, count.unsqueeze(1)).squeeze(1)
        if coupling.every_lane:
            accepted, token = count, last
        else:
            accepted = torch.where(coupling.lanes, count, accepted)
            token = torch.where(coupling.lanes, last, token)
    rows = torch.arange(width, device=logits.device)
    padded = torch.cat((drafts, drafts.new_zeros((drafts.shape[0], 1))), dim=1)
    tokens = torch.where(rows == accepted.unsqueeze(1), token.unsqueeze(1), padded)
    healthy = torch.ones_like(accepted, dtype=torch.bool)
    return Verdict(accepted, tokens, healthy, logits)


def sample_rows(
    logits: Tensor, *, params: FilterParams, draws: Tensor, coupling: Coupling | None = None
) -> Tensor:
    """[B] int64, one draw per lane from logits [B, 1, V] with uniforms [B], or by position."""
    p = target_probs(logits, params)
    if coupling is None:
        return draw(p[:, 0], draws)
    own = coupled_draws(p, coupling)[:, 0]
    return own if coupling.every_lane else torch.where(coupling.lanes, own, draw(p[:, 0], draws))


def scored_logits(
    own: Tensor, adjusted: Tensor, params: FilterParams, bounds: FilterBounds
) -> Tensor:
    """What log-probabilities are taken from: the model's own logits, or the logarithm of what was
    drawn from.

    Args:
        own: [B, W, V] float32 as the target gave them; adjusted: after penalties, rules and masks.
    """
    if bounds.max_top_logprobs < 0 or not bounds.processed_logprobs:
        return own
    return target_probs(adjusted, params).log()

"""The device's side of the host mask barrier of a masked round (contract: G5, K1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.speculation.inputs import LaneField
from flare_ray.device.speculation.proposal import write_point_masses


@dataclass(slots=True)
class Candidates:
    """Stage 1's result: drafts [B, W - 1] int64, offered [B] int64 K, copies [B, D] int64 or
    None."""

    drafts: Tensor
    offered: Tensor
    copies: Tensor | None


def obey_barrier(
    candidates: Candidates, planned: Tensor, q: Tensor, allowed: Tensor, *, copies: bool
) -> Candidates:
    """Take over what the host answered: fewer drafts, and other ones where it replaced any.

    Whether a draft is cut depends on the draft. Given that it was not, it was drawn from q over the
    allowed tokens, renormalised; and that is what it is verified against. Given that it was, its
    row's sample comes from p, or from a copy verified as one. So the law stays exact (contract:
    S1, K1); verifying against the whole q would favour what the drafter likes.

    Args:
        candidates: left as they are, for a program's first part is replayed into them.
        planned: [B, 5 + D] int64, the lanes' inputs behind the barrier.
        q: [B, D, V] float32, overwritten; rows of replaced drafts become point masses.
        allowed: [B, W, V] bool.
        copies: host-known: some draft is replaced.
    """
    offered = torch.minimum(candidates.offered, planned[:, LaneField.CEILING])
    depth = candidates.drafts.shape[1]
    narrowed = q[:, :depth].mul_(allowed[:, :depth])
    # A row without an allowed token is behind the lane's last draft.
    narrowed.div_(narrowed.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny))
    if not copies:
        return Candidates(candidates.drafts, offered, candidates.copies)
    tokens = planned[:, LaneField.COPIES : LaneField.COPIES + depth]
    replaced = tokens >= 0
    drafts = torch.where(replaced, tokens, candidates.drafts)
    write_point_masses(narrowed, drafts, replaced)
    return Candidates(drafts, offered, planned[:, LaneField.COPIES :])

"""Draft tokens, the distribution each was drawn from, and copy tokens put in their place
(contract: S1, H2).

q is kept for every draft: `draft_probs` of the drafter's logits where it proposed, a
point mass where a copy token took the place. The drafter gets the substituted token back, so its
next proposal continues the candidate prefix that is really verified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.sampling.chain import draw
from flare_ray.device.sampling.coupled import coupled_draws
from flare_ray.device.sampling.filters import FilterParams, draft_probs
from flare_ray.device.speculation.lanes import Draws
from flare_ray.errors import ContractViolation

COUPLED_POWER = 1.15
"""Sharpening of q where a draft must equal the target's own draw: any guess from q and the noise is
lawful there. Best of 0.8 to 3 over the demo's ten held-out categories: 0.975 of what the plain mode
accepts a row, 0.965 unsharpened; flat between 1.1 and 1.3."""


class Proposals:
    """The round's `DraftSink`.

    Args:
        q: [B, D, V] float32 scratch, overwritten.
        params: the lanes' sampling parameters.
        draws: the round's; their `draft` [B, D] float32, or `coupling`.
        copies: [B, D] int64 copy tokens, -1 = none; None where the execution has none.
    Attributes:
        tokens: proposed tokens by depth, each [B] int64.
        forecasts: the drafter's chances by depth, each [B] float32; empty where it makes none.
    """

    def __init__(
        self, q: Tensor, params: FilterParams, draws: Draws, copies: Tensor | None
    ) -> None:
        self.q = q
        self.tokens: list[Tensor] = []
        self.forecasts: list[Tensor] = []
        self._params = params
        self._draws = draws
        self._copies = copies

    def forecast(self, depth: int, confidence: Tensor) -> None:
        """Keep the drafter's chance [B] float32 for `depth`; see the declaration."""
        if depth != len(self.tokens) or len(self.forecasts) != depth:
            raise ContractViolation(
                f"a forecast for depth {depth} after {len(self.tokens)} drafts and "
                f"{len(self.forecasts)} forecasts"
            )
        self.forecasts.append(confidence)

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """Proposed tokens [B] int64 at `depth` from logits [B, V] float32; keeps their q."""
        kept, coupling = self.q[:, depth], self._draws.coupling
        draft_probs(logits, self._params, out=kept)
        if coupling is None:
            token = draw(kept, self._draws.draft[:, depth])
        else:
            token = coupled_draws(kept.unsqueeze(1), coupling, depth, power=COUPLED_POWER)[:, 0]
            if not coupling.every_lane:
                plain = draw(kept, self._draws.draft[:, depth])
                token = torch.where(coupling.lanes, token, plain)
        if self._copies is not None:
            copy = self._copies[:, depth]
            is_copy = copy >= 0
            token = torch.where(is_copy, copy, token)
            write_point_masses(kept, token, is_copy)
        self.tokens.append(token)
        return token

    def copy(self, depth: int) -> None:
        """See the declaration; q is a point mass at every token."""
        if self.tokens:
            raise ContractViolation("drafts are copied alone, and some have been drawn")
        q = self.q[:, :depth]
        if self._copies is None:
            tokens = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
        else:
            tokens = self._copies[:, :depth].clamp(min=0)
        q.zero_().scatter_(-1, tokens.unsqueeze(-1), 1.0)
        self.tokens.extend(tokens.unbind(1))

    def stacked(self) -> Tensor:
        """[B, D] int64, every draft in order."""
        return torch.stack(self.tokens, dim=1)


def write_point_masses(q: Tensor, tokens: Tensor, chosen: Tensor) -> None:
    """Make rows of q [..., V] point masses at their `tokens` [...] int64 where `chosen` [...] bool
    says so."""
    rows, index = chosen.unsqueeze(-1), tokens.unsqueeze(-1)
    q.masked_fill_(rows, 0.0)
    q.scatter_(-1, index, torch.where(rows, 1.0, q.gather(-1, index)))

"""A pair's halves in torch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.rmsnorm.api import RmsNorm


def joined(
    table: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    positions: Tensor,
    norms: tuple[RmsNorm, RmsNorm],
) -> Tensor:
    """See `api.PairJoin`; norms: of the embedding and of the hidden state."""
    embedded = table.index_select(0, tokens)
    embedded.masked_fill_((positions == 0).unsqueeze(1), 0.0)
    return torch.cat((norms[0](embedded), norms[1](hidden)), dim=1)

"""The convolution tap by tap."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(joined: Tensor, taps: Tensor, *, dilation: int = 1) -> Tensor:
    """See `api.short_conv`."""
    kernel = taps.shape[0]
    rows = joined.shape[1] - (kernel - 1) * dilation
    wide = joined.to(torch.float32)
    total = wide[:, :rows] * taps[0]
    for tap in range(1, kernel):
        first = tap * dilation
        total.addcmul_(wide[:, first : first + rows], taps[tap])
    return F.silu(total, inplace=True)

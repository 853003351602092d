"""Residual streams around a block, mixed by gates of low rank.

    n   = norm of each stream by itself
    g   = sigmoid(silu(n Wdown / S) Wup)
    a   = mean over streams of g * n              the block's input
    inj = 2 sigmoid(n Winject / S)                one number per stream
    R'  = R + inj (x) block output                the streams themselves are never gated

Wdown and Winject read the same rows, so they are one product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.rmsnorm.centred import CentredRmsNorm


class StreamMixer:
    """One site's gates.

    Args:
        norm: over S H channels in S groups.
        down: [rank, S H]; up: [S H, rank].
        inject: [S, S H]; None at a site without a block.
        streams: S.
    """

    def __init__(
        self, norm: CentredRmsNorm, down: Tensor, up: Tensor, inject: Tensor | None, *, streams: int
    ) -> None:
        rank, flat = down.shape
        expect_shape("up", up, flat, rank)
        if inject is not None:
            expect_shape("inject", inject, streams, flat)
        self._norm = norm
        self._streams = streams
        self._rank = rank
        joint = down if inject is None else torch.cat((down, inject))
        # S is a power of two in every known checkpoint: dividing the weights is exact.
        self._joint = Linear(joint / streams)
        self._up = Linear(up)

    def mix_in(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [R, S H] -> (block input [R, H] of their type, injection [R, S] float32; empty
        [R, 0] at a site without a block)."""
        normed = self._norm(flat)
        joint = self._joint(normed)
        gates = torch.sigmoid(self._up(F.silu(joint[:, : self._rank])))
        mixed = (gates * normed).unflatten(1, (self._streams, -1)).mean(1)
        injection = torch.sigmoid(joint[:, self._rank :].to(torch.float32)).mul_(2.0)
        return mixed, injection


def mix_out(block: Tensor, flat: Tensor, injection: Tensor) -> Tensor:
    """flat + injection (x) block.

    Args:
        block: [R, H].
        flat: [R, S H], as given to the site's `mix_in`.
        injection: [R, S] float32.
    Returns:
        [R, S H] of the streams' type, added in float32.
    Raises:
        ContractViolation: shapes disagree.
    """
    streams = injection.shape[1]
    expect_shape("block", block, flat.shape[0], flat.shape[1] // streams)
    split = flat.unflatten(1, (streams, -1))
    added = torch.addcmul(
        split.to(torch.float32), injection.unsqueeze(2), block.to(torch.float32).unsqueeze(1)
    )
    return added.to(flat.dtype).flatten(1)

"""Causal depthwise convolution with its history handed in, and the history's rows."""

from __future__ import annotations

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.short_conv import reference
from flare_ray.errors import ContractViolation


def short_conv(joined: Tensor, taps: Tensor, *, dilation: int = 1) -> Tensor:
    """silu(sum over j of taps[j] * joined[t + j * dilation]), float32.

    Args:
        joined: [B, (K - 1) * dilation + T, C] raw rows: history, then T new ones.
        taps: [K, C] float32; the last tap belongs to the row itself.
        dilation: rows between two taps.
    Returns:
        [B, T, C] float32.
    Raises:
        ContractViolation: channels disagree, or there is no new row.
    """
    expect_shape("joined", joined, None, None, taps.shape[1])
    history = (taps.shape[0] - 1) * dilation
    if joined.shape[1] <= history:
        raise ContractViolation(
            f"joined has {joined.shape[1]} rows, expected the history of {history} and at least "
            "one new row"
        )
    return reference.short_conv(joined, taps, dilation=dilation)

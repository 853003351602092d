"""Causal depthwise convolution with its history handed in, and the history's rows."""

from __future__ import annotations

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.short_conv import reference
from flare_ray.errors import ContractViolation


def short_conv(joined: Tensor, taps: Tensor) -> Tensor:
    """silu(sum over j of taps[j] * joined[t + j]), float32.

    Args:
        joined: [B, K - 1 + T, C] raw rows: K - 1 of history, then T new ones.
        taps: [K, C] float32; the last tap belongs to the row itself.
    Returns:
        [B, T, C] float32.
    Raises:
        ContractViolation: channels disagree, or there is no new row.
    """
    expect_shape("joined", joined, None, None, taps.shape[1])
    if joined.shape[1] < taps.shape[0]:
        raise ContractViolation(
            f"joined has {joined.shape[1]} rows, expected the history of {taps.shape[0] - 1} and "
            "at least one new row"
        )
    return reference.short_conv(joined, taps)

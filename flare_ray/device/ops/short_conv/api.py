"""Causal depthwise convolution with its history handed in, and the history's rows."""

from __future__ import annotations

import torch
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


def fits_round(raw: Tensor, window: Tensor, taps: Tensor) -> bool:
    """Whether `round_conv` takes such operands: four taps, channels together, of one type; on CPU
    that type is float32."""
    kind = raw.is_cuda or (raw.device.type == "cpu" and raw.dtype == torch.float32)
    rows = raw.dtype == window.dtype and raw.stride(1) == 1
    return kind and rows and taps.shape[0] == 4 and window.is_contiguous()


def round_conv(
    raw: Tensor, window: Tensor, taps: Tensor, *, slots: Tensor, column: Tensor
) -> Tensor:
    """A round's convolution with its window read and written in place (contract: M2).

    Lane b's history is window[slots[b], column[b] + 1 ..]; its history and new rows go to places
    0 .. K - 2 + T, so that the next round drops rejected rows by the column that it reads at.

    Args:
        raw: [B * T, C] new rows, any row stride.
        window: [S + 1, depth, C], written in place.
        taps: [K, C] float32, K = 4.
        slots / column: [B] int64.
    Returns:
        [B * T, C] float32, as `short_conv`.
    Raises:
        ContractViolation: operands that `fits_round` refuses.
    """
    if not fits_round(raw, window, taps):
        raise ContractViolation(
            "round_conv takes CUDA rows or float32 ones, four taps and a contiguous window of the "
            "rows' type, got "
            f"{raw.dtype} rows on {raw.device}, {taps.shape[0]} taps, {window.dtype}"
        )
    if not raw.is_cuda:
        from flare_ray.device.ops.short_conv import numba

        return numba.round_conv(raw, window, taps, slots=slots, column=column)
    from flare_ray.device.ops.short_conv import triton

    return triton.round_conv(raw, window, taps, slots=slots, column=column)

"""A round's delta rule with its gates and output norm, as one operator.

    log decay = bound * sigmoid(offset + factor * raw);  beta = sigmoid(raw)
    out       = norm(delta rule) * sigmoid(raw)

Prompts, and what has no such form, take the parts one by one (`api.DeltaRule`, `layers/kda.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.kda.api import SavedStates


@dataclass(slots=True)
class Gates:
    """Constants of a block's gates.

    Attributes:
        factor / offset: [H D] float32, of the forget gate's raw values.
        bound: of the log decay, below 0.
        norm: [D] float32, the output norm's weight times sqrt(D).
        floor: the norm's epsilon times D.
    """

    factor: Tensor
    offset: Tensor
    bound: float
    norm: Tensor
    floor: float


@dataclass(slots=True)
class GatedRows:
    """A round's rows as the projections leave them.

    Attributes:
        qkv: [B * T, 3, H, D] float32 after the convolution.
        outer: [2, B * T, H D], forget gate and output gate before their sigmoids.
        beta: [B * T, H] before its sigmoid; any row stride.
    """

    qkv: Tensor
    outer: Tensor
    beta: Tensor


def fits_gated(recurrent: Tensor) -> bool:
    """Whether `gated_round` takes such states: on CPU, and on CUDA a power of two of channels up to
    128."""
    dim = recurrent.shape[-1]
    fits = recurrent.device.type == "cpu"
    if recurrent.is_cuda:
        fits = 16 <= dim <= 128 and dim & (dim - 1) == 0
    return fits and recurrent.is_contiguous()


def gated_round(rows: GatedRows, gates: Gates, saved: SavedStates) -> Tensor:
    """Run B lanes of T rows, keep the state after each, norm and gate the outputs.

    Args:
        rows: of the round, lane by lane.
        gates: the block's constants.
        saved: [M, H, D, D] states that `fits_gated` accepts, written in place; `write` [B * T].
    Returns:
        [B * T, H D] of `rows.outer`'s type.
    Raises:
        ContractViolation: shapes disagree.
    """
    total, _, heads, dim = rows.qkv.shape
    expect_shape("outer", rows.outer, 2, total, heads * dim)
    expect_shape("beta", rows.beta, total, heads)
    expect_shape("rows", saved.rows, None, heads, dim, dim)
    expect_shape("write", saved.write, total)
    if not saved.rows.is_cuda:
        from flare_ray.device.ops.kda import numba

        return numba.gated_round(rows, gates, saved.rows, read=saved.read, write=saved.write)
    from flare_ray.device.ops.kda import triton

    return triton.gated_round(rows, gates, saved.rows, read=saved.read, write=saved.write)

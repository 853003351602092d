"""The delta rule over saved states: few rows with every state kept, or many with the last one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.kda import chunked, reference, unrolled
from flare_ray.device.ops.state_rows.api import scatter_rows
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class DeltaRows:
    """Inputs of B lanes of T rows, float32.

    Attributes:
        qkv: [B, T, 3, H, D] after the short convolution, not yet normalised.
        log_decay: [B, T, H, D], in [lower bound, 0].
        beta: [B, T, H], in (0, 1).
    """

    qkv: Tensor
    log_decay: Tensor
    beta: Tensor


@dataclass(slots=True)
class SavedStates:
    """Where states are read and written.

    Attributes:
        rows: [M, H, D, D] float32, key dimension first; written in place.
        read: [B] int64, row each lane starts from.
        write: int64 rows to write, [B * T] in a round, [B] in a prefill.
    """

    rows: Tensor
    read: Tensor
    write: Tensor


class DeltaRule:
    """The delta rule for one decay bound.

    Args:
        max_width: most rows of a round.
        lower_bound: of the log decay, below 0.
    Raises:
        ContractViolation: a bound so low that one row's decay leaves float32's range.
    """

    def __init__(self, *, max_width: int, lower_bound: float) -> None:
        self._max_width = max_width
        self._sub = chunked.sub_block_rows(lower_bound)
        if not self._sub:
            raise ContractViolation(
                f"log decay bound {lower_bound} is below -{unrolled.MAX_EXPONENT}; the recipe must "
                "refuse it"
            )
        self._unrolls = max_width * -lower_bound <= unrolled.MAX_EXPONENT

    def round(self, rows: DeltaRows, saved: SavedStates) -> Tensor:
        """Run a round's rows and keep the state after each.

        Returns:
            [B, T, H, D] float32.
        Raises:
            ContractViolation: shapes disagree, or the round is wider than `max_width`.
        """
        batch, width = rows.qkv.shape[:2]
        _check(rows, saved, batch * width)
        if width > self._max_width:
            raise ContractViolation(f"{width} rows in a round, prepared for {self._max_width}")
        if _compiles(saved.rows):
            return _run_compiled(rows.qkv, rows.log_decay, rows.beta, saved)
        state = saved.rows.index_select(0, saved.read)
        inputs = (rows.qkv, rows.log_decay, rows.beta, state)
        if self._unrolls:
            return unrolled.run(*inputs, saved=saved.rows, write=saved.write.view(batch, width))
        output, states = reference.delta_rule(*inputs)
        scatter_rows(saved.rows, saved.write, states.flatten(0, 1))
        return output

    def prefill(self, rows: DeltaRows, saved: SavedStates, valid: Tensor) -> Tensor:
        """Run a chunk's rows and keep each lane's last valid state.

        Args:
            valid: [B, T] bool; invalid rows leave the state as it is and return anything.
        Returns:
            [B, T, H, D] float32.
        Raises:
            ContractViolation: shapes disagree.
        """
        batch = rows.qkv.shape[0]
        _check(rows, saved, batch)
        expect_shape("valid", valid, batch, rows.qkv.shape[1])
        takes_part = valid.to(torch.float32).unsqueeze(-1)
        log_decay, beta = rows.log_decay * takes_part.unsqueeze(-1), rows.beta * takes_part
        if _compiles(saved.rows):
            return _run_compiled(rows.qkv, log_decay, beta, saved)
        output, state = chunked.run(
            rows.qkv,
            log_decay,
            beta,
            saved.rows.index_select(0, saved.read),
            self._sub,
        )
        scatter_rows(saved.rows, saved.write, state)
        return output


def _check(rows: DeltaRows, saved: SavedStates, writes: int) -> None:
    batch, width, three, heads, dim = rows.qkv.shape
    if three != 3:
        raise ContractViolation(f"qkv has {three} parts, expected q, k and v")
    expect_shape("log_decay", rows.log_decay, batch, width, heads, dim)
    expect_shape("beta", rows.beta, batch, width, heads)
    expect_shape("rows", saved.rows, None, heads, dim, dim)
    expect_shape("read", saved.read, batch)
    expect_shape("write", saved.write, writes)


def _compiles(saved: Tensor) -> bool:
    return saved.device.type == "cpu" and saved.is_contiguous()


def _run_compiled(qkv: Tensor, log_decay: Tensor, beta: Tensor, saved: SavedStates) -> Tensor:
    from flare_ray.device.ops.kda import numba

    places = {"saved": saved.rows, "read": saved.read, "write": saved.write}
    return numba.run(qkv, log_decay.exp(), beta, **places)

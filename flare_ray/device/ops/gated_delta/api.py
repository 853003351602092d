"""The gated delta rule over saved states: few rows with every state kept, or many with the last
one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.gated_delta import chunked, reference
from flare_ray.device.ops.gated_delta.reference import GatedRows, HeadShape
from flare_ray.device.ops.state_rows.api import scatter_rows

__all__ = ["GatedDeltaRule", "GatedRows", "HeadShape", "SavedStates"]


@dataclass(slots=True)
class SavedStates:
    """Where states are read and written.

    Attributes:
        rows: [M, Hv, dk, dv] float32, written in place.
        read: [B] int64, row each lane starts from.
        write: int64 rows to write, [B * T] in a round, [B] in a prefill.
    """

    rows: Tensor
    read: Tensor
    write: Tensor


class GatedDeltaRule:
    """The rule for one set of heads."""

    def __init__(self, heads: HeadShape) -> None:
        self.heads = heads

    def round(self, rows: GatedRows, saved: SavedStates) -> Tensor:
        """Run a round's rows and keep the state after each.

        Returns:
            [B, T, Hv, dv] float32.
        Raises:
            ContractViolation: shapes disagree.
        """
        batch, width = rows.beta.shape[:2]
        self._check(rows, saved, batch * width)
        if _compiles(saved.rows):
            return self._compiled(rows, saved)
        state = saved.rows.index_select(0, saved.read)
        output, states = reference.gated_delta_rule(rows, state, self.heads)
        scatter_rows(saved.rows, saved.write, states.flatten(0, 1))
        return output

    def prefill(self, rows: GatedRows, saved: SavedStates, valid: Tensor) -> Tensor:
        """Run a chunk's rows and keep each lane's last valid state.

        Args:
            valid: [B, T] bool; invalid rows leave the state as it is and return anything.
        Returns:
            [B, T, Hv, dv] float32.
        Raises:
            ContractViolation: shapes disagree.
        """
        batch, width = rows.beta.shape[:2]
        self._check(rows, saved, batch)
        expect_shape("valid", valid, batch, width)
        takes_part = valid.to(torch.float32).unsqueeze(-1)
        rows = GatedRows(rows.mixed, rows.log_decay * takes_part, rows.beta * takes_part)
        if _compiles(saved.rows):
            return self._compiled(rows, saved)
        state = saved.rows.index_select(0, saved.read)
        output, state = chunked.run(rows, state, self.heads)
        scatter_rows(saved.rows, saved.write, state)
        return output

    def _compiled(self, rows: GatedRows, saved: SavedStates) -> Tensor:
        from flare_ray.device.ops.gated_delta import numba

        places = {"saved": saved.rows, "read": saved.read, "write": saved.write}
        return numba.run(rows, self.heads, **places)

    def _check(self, rows: GatedRows, saved: SavedStates, writes: int) -> None:
        heads = self.heads
        batch, width, _ = rows.beta.shape
        expect_shape("mixed", rows.mixed, batch, width, heads.channels)
        expect_shape("log_decay", rows.log_decay, batch, width, heads.value_heads)
        expect_shape("beta", rows.beta, batch, width, heads.value_heads)
        expect_shape("rows", saved.rows, None, *heads.state)
        expect_shape("read", saved.read, batch)
        expect_shape("write", saved.write, writes)


def _compiles(saved: Tensor) -> bool:
    return saved.device.type == "cpu" and saved.is_contiguous()

"""The gated delta rule: few rows with every state kept or recorded, or many with the last one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.gated_delta import chunked, reference
from flare_ray.device.ops.gated_delta.records import Records, forget, settle
from flare_ray.device.ops.gated_delta.reference import GatedRows, HeadShape
from flare_ray.device.ops.state_rows.api import scatter_rows
from flare_ray.errors import ContractViolation

__all__ = [
    "GatedDeltaRule",
    "GatedRows",
    "HeadShape",
    "RecordedStates",
    "Records",
    "SavedStates",
]


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


@dataclass(slots=True)
class RecordedStates:
    """States in compact form.

    Attributes:
        base: [S + 1, Hv, dk, dv] float32, states before the last round; written in place.
        records: of the last round's rows; written in place.
        slots: [B] int64.
        column: [B] int64, the last round's row after which a lane's state is live.
    """

    base: Tensor
    records: Records
    slots: Tensor
    column: Tensor


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

    def recorded_round(self, rows: GatedRows, states: RecordedStates) -> Tensor:
        """Run a round's rows from the live states; leaves these as base, and the rows' records.

        Returns:
            [B, T, Hv, dv] float32, bit by bit those of `round` where both are compiled.
        Raises:
            ContractViolation: shapes disagree, or there are more rows than records.
        """
        width = rows.beta.shape[1]
        self._check_rows(rows)
        entries = states.records.decays.shape[1]
        if width > entries:
            raise ContractViolation(f"{width} rows in a round, {entries} records are kept")
        settle(states.base, states.records, states.slots, states.column + 1)
        if _compiles(states.base):
            from flare_ray.device.ops.gated_delta import numba

            return numba.record(rows, self.heads, states.base, states.records, states.slots)
        before = states.base.index_select(0, states.slots)
        output, _, deltas = reference.traced_rule(rows, before, self.heads)
        _, keys, _ = reference.queries_keys_values(rows.mixed, self.heads)
        records = states.records
        for tensor, values in (
            (records.corrections, deltas),
            (records.keys, keys),
            (records.decays, rows.log_decay.exp()),
        ):
            tensor[:, :width].index_copy_(0, states.slots, values)
        return output

    def recorded_prefill(self, rows: GatedRows, states: RecordedStates, valid: Tensor) -> Tensor:
        """As `prefill`, from the live states; each lane's last valid state becomes its base."""
        settle(states.base, states.records, states.slots, states.column + 1)
        forget(states.records, states.slots)
        return self.prefill(rows, SavedStates(states.base, states.slots, states.slots), valid)

    def _compiled(self, rows: GatedRows, saved: SavedStates) -> Tensor:
        from flare_ray.device.ops.gated_delta import numba

        places = {"saved": saved.rows, "read": saved.read, "write": saved.write}
        return numba.run(rows, self.heads, **places)

    def _check(self, rows: GatedRows, saved: SavedStates, writes: int) -> None:
        self._check_rows(rows)
        expect_shape("rows", saved.rows, None, *self.heads.state)
        expect_shape("read", saved.read, rows.beta.shape[0])
        expect_shape("write", saved.write, writes)

    def _check_rows(self, rows: GatedRows) -> None:
        batch, width, _ = rows.beta.shape
        expect_shape("mixed", rows.mixed, batch, width, self.heads.channels)
        expect_shape("log_decay", rows.log_decay, batch, width, self.heads.value_heads)
        expect_shape("beta", rows.beta, batch, width, self.heads.value_heads)


def _compiles(saved: Tensor) -> bool:
    return saved.device.type == "cpu" and saved.is_contiguous()

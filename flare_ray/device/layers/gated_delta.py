"""A recurrent block: projections, short convolution, gated delta rule, gated norm, output
product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flare_ray.device.layers.rows import RecurrentRows, join_window
from flare_ray.device.ops.gated_delta.api import (
    GatedDeltaRule,
    GatedRows,
    RecordedStates,
    Records,
    SavedStates,
)
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.short_conv.api import short_conv


@dataclass(slots=True)
class GatedDeltaWeights:
    """This rank's heads: C channels of q, k and v, Hv value heads of dv, K taps.

    Attributes:
        joint: [C + Hv dv + 2 Hv, H]: q, k, v, output gate, beta, decay.
        taps: [K, C] float32.
        dt_bias: [Hv] float32, added to the decay's input.
        a_log: [Hv] float32, log of the decay's factor.
        norm: [dv] float32.
        output: [H, Hv dv].
    """

    joint: Tensor
    taps: Tensor
    dt_bias: Tensor
    a_log: Tensor
    norm: Tensor
    output: Tensor


@dataclass(slots=True)
class GatedDeltaState:
    """One layer's state.

    Attributes:
        window: [S + 1, keep + 8, C] raw inputs of the convolution.
        recurrent: float32; [S + 1, 8, Hv, dk, dv], a state per row, or with records [S + 1, Hv, dk,
            dv], the states before the last round.
        records: of the last round's rows; None = a state per row.
    """

    window: Tensor
    recurrent: Tensor
    records: Records | None = None


class GatedDeltaBlock:
    """Gated delta rule over saved states.

    Args:
        weights: this rank's part.
        rule: for this rank's heads, shared by all layers.
        gate: activation of the output gate.
        eps: of the output norm.
    """

    def __init__(
        self,
        weights: GatedDeltaWeights,
        rule: GatedDeltaRule,
        *,
        gate: Literal["sigmoid", "silu"],
        eps: float,
    ) -> None:
        heads = rule.heads
        self._rule = rule
        self._joint = Linear(weights.joint)
        self._taps = weights.taps
        self._dt_bias = weights.dt_bias
        self._factor = weights.a_log.exp().neg()
        self._gate = torch.sigmoid if gate == "sigmoid" else F.silu
        self._norm = weights.norm * math.sqrt(heads.value_dim)
        floor = math.sqrt(eps * heads.value_dim)
        self._floor = torch.full((1,), floor, device=weights.norm.device)
        self._output = Linear(weights.output)
        gates = heads.value_heads * heads.value_dim
        self._parts = [heads.channels, gates, heads.value_heads, heads.value_heads]

    def __call__(self, x: Tensor, rows: RecurrentRows, state: GatedDeltaState) -> Tensor:
        """Run rows; writes their states and raw inputs.

        Args:
            x: [B * T, H].
            rows: indices.
            state: of this layer, written in place.
        Returns:
            [B * T, H], this rank's partial sum.
        """
        raw, gate, beta, decay = self._joint(x).split(self._parts, dim=1)
        joined = join_window(raw, rows, state.window)
        step = F.softplus(decay.to(torch.float32) + self._dt_bias)
        lanes = (rows.batch, rows.width)
        inputs = GatedRows(
            mixed=short_conv(joined, self._taps),
            log_decay=(step * self._factor).unflatten(0, lanes),
            beta=torch.sigmoid(beta).to(torch.float32).unflatten(0, lanes),
        )
        result = self._run(inputs, rows, state)
        return self._output(self._gated_norm(result, gate).to(x.dtype))

    def _run(self, inputs: GatedRows, rows: RecurrentRows, state: GatedDeltaState) -> Tensor:
        if state.records is not None:
            recorded = RecordedStates(state.recurrent, state.records, rows.slots, rows.column)
            if rows.valid is None:
                return self._rule.recorded_round(inputs, recorded)
            return self._rule.recorded_prefill(inputs, recorded, rows.valid)
        saved = SavedStates(state.recurrent.flatten(0, 1), rows.state_read, rows.state_write)
        if rows.valid is None:
            return self._rule.round(inputs, saved)
        return self._rule.prefill(inputs, saved, rows.valid)

    def _gated_norm(self, result: Tensor, gate: Tensor) -> Tensor:
        """[B, T, Hv, dv] float32 and raw gate [B * T, Hv dv] -> [B * T, Hv dv] float32."""
        length = torch.linalg.vector_norm(result, dim=-1, keepdim=True).hypot_(self._floor)
        normed = torch.div(result, length).mul_(self._norm)
        return normed.reshape(gate.shape).mul_(self._gate(gate.to(torch.float32)))

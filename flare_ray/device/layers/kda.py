"""A recurrent block: projections, short convolution, delta rule, gated norm, output product."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.layers.rows import RecurrentRows, join_window
from flare_ray.device.ops.kda.api import DeltaRows, DeltaRule, SavedStates
from flare_ray.device.ops.kda.gated import GatedRows, Gates, fits_gated, gated_round
from flare_ray.device.ops.linear.api import Halves, Linear
from flare_ray.device.ops.short_conv.api import fits_round, round_conv, short_conv


@dataclass(slots=True)
class KdaWeights:
    """This rank's heads; h of them with D channels, K taps.

    Attributes:
        joint: [3 h D + h + 2 D, H]: q, k, v, beta, then the inner halves of forget and output gate.
        taps: [K, 3 h D] float32.
        gates: [2, D, h D] outer halves, forget then output.
        dt_bias: [h D] float32, added to the forget gate.
        a_log: [h] float32, log of the forget gate's factor.
        norm: [D] float32.
        output: [H, h D].
    """

    joint: Tensor
    taps: Tensor
    gates: Tensor
    dt_bias: Tensor
    a_log: Tensor
    norm: Tensor
    output: Tensor


class KdaBlock:
    """Kimi delta attention over saved states.

    Args:
        weights: this rank's part.
        rule: shared by all layers.
        lower_bound: of the log decay.
        eps: of the output norm.
    """

    def __init__(
        self, weights: KdaWeights, rule: DeltaRule, *, lower_bound: float, eps: float
    ) -> None:
        dim = self._dim = weights.norm.shape[0]
        heads = self._heads = weights.a_log.shape[0]
        device = weights.norm.device
        self._rule = rule
        self._lower_bound = lower_bound
        self._joint = Linear(weights.joint)
        self._taps = weights.taps
        self._gates = Halves(weights.gates)
        # sigmoid(exp(A) (g + dt)) and sigmoid(z) in one pass: factors and offsets of both gates
        factor = weights.a_log.exp().repeat_interleave(dim)
        self._factor = torch.stack((factor, torch.ones_like(factor))).unsqueeze(1)
        offset = factor * weights.dt_bias
        self._offset = torch.stack((offset, torch.zeros_like(offset))).unsqueeze(1)
        self._norm = (weights.norm * math.sqrt(dim)).repeat(heads)
        self._floor = torch.full((1,), math.sqrt(eps * dim), device=device)
        self._output = Linear(weights.output)
        self._constants = Gates(
            factor=factor,
            offset=offset,
            bound=lower_bound,
            norm=weights.norm * math.sqrt(dim),
            floor=eps * dim,
        )

    def __call__(self, x: Tensor, rows: RecurrentRows, recurrent: Tensor, window: Tensor) -> Tensor:
        """Run rows; writes their states and raw inputs.

        Args:
            x: [B * T, H].
            rows: indices.
            recurrent: [S + 1, 8, h, D, D] float32, written in place.
            window: [S + 1, keep + 8, 3 h D], written in place.
        Returns:
            [B * T, H], this rank's partial sum.
        """
        batch, width, heads, dim = rows.batch, rows.width, self._heads, self._dim
        channels = 3 * heads * dim
        joint = self._joint(x)
        fits = fits_round(joint[:, :channels], window, self._taps) and fits_gated(recurrent)
        if rows.valid is None and fits:
            return self._output(self._fused_round(joint, rows, recurrent, window))
        mixed = short_conv(join_window(joint[:, :channels], rows, window), self._taps)
        outer = self._gates(joint[:, channels + heads :])
        gates = torch.addcmul(self._offset, outer, self._factor)
        gates = gates.sigmoid_()
        beta = torch.sigmoid(joint[:, channels : channels + heads].to(torch.float32))
        delta_rows = DeltaRows(
            qkv=mixed.view(batch, width, 3, heads, dim),
            log_decay=(gates[0] * self._lower_bound).view(batch, width, heads, dim),
            beta=beta.view(batch, width, heads),
        )
        saved = SavedStates(recurrent.flatten(0, 1), rows.state_read, rows.state_write)
        if rows.valid is None:
            result = self._rule.round(delta_rows, saved)
        else:
            result = self._rule.prefill(delta_rows, saved, rows.valid)
        return self._output(self._gated_norm(result, gates[1]).to(x.dtype))

    def _fused_round(
        self, joint: Tensor, rows: RecurrentRows, recurrent: Tensor, window: Tensor
    ) -> Tensor:
        """A round between its first and its last product, in few operators."""
        heads, dim = self._heads, self._dim
        channels = 3 * heads * dim
        mixed = round_conv(
            joint[:, :channels], window, self._taps, slots=rows.slots, column=rows.column
        )
        gated = GatedRows(
            qkv=mixed.view(-1, 3, heads, dim),
            outer=self._gates(joint[:, channels + heads :]),
            beta=joint[:, channels : channels + heads],
        )
        saved = SavedStates(recurrent.flatten(0, 1), rows.state_read, rows.state_write)
        return gated_round(gated, self._constants, saved)

    def _gated_norm(self, result: Tensor, gate: Tensor) -> Tensor:
        """[B, T, h, D] float32 and sigmoid gate [B * T, h D] -> [B * T, h D] float32."""
        length = torch.linalg.vector_norm(result, dim=-1, keepdim=True).hypot_(self._floor)
        normed = torch.empty_like(gate)
        torch.div(result, length, out=normed.view(result.shape))
        return normed.mul_(self._norm).mul_(gate)

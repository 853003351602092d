"""Packed experts on CPU: the chosen ones are unpacked into panels, then multiplied as plain ones.

Only chosen experts are unpacked, so only their part of the scratch is ever touched; one scratch
serves all layers of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.moe.packed import Fp4Stack
from flare_ray.device.ops.moe.reference import Rounding, Routing
from flare_ray.errors import ContractViolation


class UnpackScratch:
    """Panels of one layer, by size; of one rank."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def panels(self, experts: int, width: int, hidden: int) -> tuple[Tensor, Tensor]:
        """Panels of gate_up [E, 2 I, H] and down [E, H, I], float32, undefined."""
        from flare_ray.device.ops.panels.numba import PANEL

        key = (experts, width, hidden)
        if key not in self._made:
            first, second = (
                torch.empty((experts, -(-rows // PANEL), depth, PANEL))
                for rows, depth in ((2 * width, hidden), (hidden, width))
            )
            self._made[key] = first, second
        return self._made[key]


class UnpackedExperts:
    """Routed experts of one layer, packed, and shared ones, plain.

    Args:
        stack: the routed experts.
        shared: gate_up [S, 2 I, H] and down [S, I, H] of the shared ones; None = there are none.
        weighted: shared experts are listed and weighed like routed ones, behind them.
        limit, rounding: as `Experts`.
        scratch: of the rank.
    """

    def __init__(
        self,
        stack: Fp4Stack,
        shared: tuple[Tensor, Tensor] | None,
        *,
        weighted: bool,
        limit: float,
        rounding: Rounding | None,
        scratch: UnpackScratch,
    ) -> None:
        from flare_ray.device.ops.panels.numba import packed

        self._stack, self._scratch = stack, scratch
        self._routed, double, _ = stack.gate_up.shape
        self._width, self._hidden = double // 2, stack.down.shape[1]
        self._limit, self._rounding = limit, rounding
        self._shared, self._total, self._unweighted = None, self._routed, 0
        if shared is not None:
            gate_up, down = shared
            if down.dtype != torch.float32:
                raise ContractViolation(f"shared experts in {down.dtype}; CPU ranks run float32")
            both = (gate_up, down.transpose(1, 2))
            self._shared = tuple(packed(weight, narrow=False) for weight in both)
            self._total += down.shape[0]
            self._unweighted = 0 if weighted else down.shape[0]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.__call__`, for rows already rounded."""
        from flare_ray.device.ops.moe.numba import StoredExperts, chosen_experts
        from flare_ray.device.ops.moe.unpack.numba import unpack

        gate_up, down = self._scratch.panels(self._total, self._width, self._hidden)
        unpack(self._stack, experts, gate_up, down)
        if self._shared is not None:
            gate_up[self._routed :].copy_(self._shared[0])
            down[self._routed :].copy_(self._shared[1])
        held = StoredExperts(gate_up, down, self._width, self._hidden)
        return chosen_experts(
            x,
            held,
            Routing(experts, weights),
            shared=self._unweighted,
            limit=self._limit,
            rounding=self._rounding,
        )

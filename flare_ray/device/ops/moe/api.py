"""A layer's experts, routed and shared, as one sum.

Four static forms; which one runs follows from sizes the host knows, never from the routing:

    compiled  float32 on CPU: the chosen and shared experts' weights are read in place
    fused     few experts: shared experts join the routed ones with weight 1, and everything is two
              products over all experts
    all       many rows: two products over all routed experts, the shared ones apart
    chosen    few rows: the chosen experts' weights are gathered, the shared ones apart

On CUDA experts without a rounding run grouped kernels (`triton`). Routed experts that are stored
packed may stay so (`PackedExperts`): in NVFP4 and MXFP4 everywhere, in block FP8 on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.moe import reference
from flare_ray.device.ops.moe.packed import Fp8Stack, Stack
from flare_ray.device.ops.moe.reference import Rounding, Routing
from flare_ray.device.ops.moe.unpack.api import UnpackedExperts, UnpackScratch
from flare_ray.device.ops.swiglu.api import clamped_swiglu

FUSED_EXPERTS_PER_CHOICE = 4
"""Experts per chosen expert up to which all of them cost less than gathering the chosen ones: at 8
experts of 128 x 256, 2 chosen, one row takes 95 us fused and 150 us gathered (Zen 4 core)."""


CUDA_ROWS = 512
"""Most rows of one grouped product on CUDA; longer passes go in slices. The routing pack compares
every assignment with every other one. A guess, to be replaced by a sorted form for prefill."""


@dataclass(slots=True)
class ExpertWeights:
    """gate_up: [E + shared, 2 I, H], gate rows first; down: [E + shared, I, H]; the shared experts,
    each of width I, come last."""

    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class SharedExperts:
    """Plain experts that every row takes beside packed ones.

    Attributes:
        weighted: they are weighed: they follow the routed ones in a row's list, whose weights
            beyond the routed ones' are theirs. False = each counts once.
    """

    weights: ExpertWeights
    weighted: bool = False


def _compiles(weight: Tensor) -> bool:
    """Whether such experts have a compiled form."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32


class Experts:
    """The experts of one layer.

    Args:
        weights: kept only where a form reads them unpacked.
        shared: shared experts at the end of `weights`.
        top_k: routed experts per row.
        limit: bound of the activation's inputs.
        rounding: of rows and of weighted activations before their products; None = they stay as
            they are.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        shared: int,
        top_k: int,
        limit: float,
        rounding: Rounding | None = None,
    ) -> None:
        total, double, hidden = weights.gate_up.shape
        expect_shape("down", weights.down, total, double // 2, hidden)
        self._limit = limit
        self._top_k = top_k
        self._shared = shared
        self._held: Any = None
        self._grouped: Any = None
        self._rounding = rounding
        if _compiles(weights.down):
            from flare_ray.device.ops.moe import numba

            self._compiled = numba.chosen_experts
            self._held = numba.stored(weights.gate_up, weights.down)
            return
        if rounding is None and weights.down.is_cuda:
            from flare_ray.device.ops.moe import triton

            self._grouped = triton.PlainExperts(
                weights.gate_up, weights.down, shared=shared, limit=limit
            )
            return
        routed = total - shared
        if routed <= FUSED_EXPERTS_PER_CHOICE * top_k:
            self._routed = None
            self._packed: _Packed | None = _Packed(weights, limit, rounding)
            self._shares = torch.zeros((1, total), device=weights.down.device)
            self._shares[:, routed:] = 1.0
        else:
            self._routed = ExpertWeights(weights.gate_up[:routed], weights.down[:routed])
            rest = ExpertWeights(weights.gate_up[routed:], weights.down[routed:])
            self._packed = _Packed(rest, limit, rounding) if shared else None

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum over a row's experts of weight times output, plus the shared experts' outputs.

        Args:
            x: [R, H].
            experts: [R, top_k] int64.
            weights: [R, top_k] float32.
        Returns:
            [R, H] of x's type.
        Raises:
            ContractViolation: shapes disagree.
        """
        expect_shape("experts", experts, x.shape[0], self._top_k)
        expect_shape("weights", weights, x.shape[0], self._top_k)
        if self._rounding is not None:
            x = self._rounding(x)
        if self._held is not None:
            return self._compiled(
                x,
                self._held,
                Routing(experts, weights),
                shared=self._shared,
                limit=self._limit,
                rounding=self._rounding,
            )
        if self._grouped is not None:
            return _sliced(self._grouped, x, experts, weights)
        if self._routed is None and self._packed is not None:
            shares = self._shares.expand(x.shape[0], -1).scatter(1, experts, weights)
            return self._packed(x, shares)
        result = self._apart(x, experts, weights)
        return result if self._packed is None else result.add_(self._packed(x, None))

    def _apart(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The routed experts alone."""
        held = self._routed
        assert held is not None
        count = held.gate_up.shape[0]
        if x.shape[0] * self._top_k < count:
            return reference.chosen_experts(
                x,
                held.gate_up,
                held.down,
                Routing(experts, weights),
                limit=self._limit,
                rounding=self._rounding,
            )
        shares = weights.new_zeros((x.shape[0], count)).scatter_(1, experts, weights)
        return reference.all_experts(
            x, held.gate_up, held.down, shares, limit=self._limit, rounding=self._rounding
        )


class PackedExperts:
    """Routed experts whose weights stay as stored, beside plain shared ones.

    On CUDA kernels unpack what they multiply. On CPU the chosen experts are unpacked for the call,
    and the sum is that of `Experts` bit by bit: a form for memory and for tests, not for speed.

    Args:
        stack: the routed experts.
        shared: shared experts, None = there are none.
        top_k: routed experts per row.
        limit: bound of the activation's inputs.
        rounding: as `Experts`.
        scratch: of this rank on CPU; None = of this layer alone.
    """

    def __init__(
        self,
        stack: Stack,
        shared: SharedExperts | None,
        *,
        top_k: int,
        limit: float,
        rounding: Rounding | None = None,
        scratch: UnpackScratch | None = None,
    ) -> None:
        weighted = shared is not None and shared.weighted
        plain = None if shared is None else shared.weights
        self._columns = top_k + plain.down.shape[0] if plain and weighted else top_k
        self._top_k = top_k
        self._rounding = rounding
        self._unpacked: Any = None
        self._shared = None
        if stack.down.device.type == "cpu":
            assert not isinstance(stack, Fp8Stack)  # kept_format dequantises it on CPU
            self._unpacked = UnpackedExperts(
                stack,
                None if plain is None else (plain.gate_up, plain.down),
                weighted=weighted,
                limit=limit,
                rounding=rounding,
                scratch=UnpackScratch() if scratch is None else scratch,
            )
            return
        self._shared = None if plain is None else _Packed(plain, limit, rounding)
        self._routed: Any
        if isinstance(stack, Fp8Stack):
            from flare_ray.device.ops.moe.fp8 import triton as fp8

            self._routed = fp8.Fp8Experts(stack, limit=limit, rounding=rounding)
        else:
            from flare_ray.device.ops.moe.fp4 import triton as fp4

            self._routed = fp4.Fp4Experts(stack, limit=limit, rounding=rounding)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See `Experts.__call__`."""
        expect_shape("experts", experts, x.shape[0], self._columns)
        expect_shape("weights", weights, x.shape[0], self._columns)
        if self._rounding is not None:
            x = self._rounding(x)
        if self._unpacked is not None:
            return self._unpacked(x, experts, weights)
        return _sliced(self._run, x, experts, weights)

    def _run(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        routed, shares = weights[:, : self._top_k], weights[:, self._top_k :]
        extra = None
        if self._shared is not None:
            extra = self._shared(x, shares if shares.shape[1] else None)
        return self._routed(x, experts[:, : self._top_k], routed, extra)


def _sliced(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """`run` over at most CUDA_ROWS rows at a time."""
    parts = (value.split(CUDA_ROWS) for value in (x, experts, weights))
    results = [run(*part) for part in zip(*parts, strict=True)]
    return results[0] if len(results) == 1 else torch.cat(results)


class _Packed:
    """Experts side by side as one wide feed-forward."""

    def __init__(self, weights: ExpertWeights, limit: float, rounding: Rounding | None) -> None:
        self._count, self._double, hidden = weights.gate_up.shape
        self._gate_up = Linear(weights.gate_up.reshape(-1, hidden))
        self._down = Linear(weights.down.reshape(-1, hidden).t())
        self._limit = limit
        self._rounding = rounding

    def __call__(self, x: Tensor, shares: Tensor | None) -> Tensor:
        """Outputs [R, H] summed with `shares` [R, count] float32, or with 1."""
        both = self._gate_up(x).view(x.shape[0], self._count, self._double)
        active = clamped_swiglu(both, limit=self._limit)
        if shares is not None:
            active.mul_(shares.unsqueeze(-1))
        if self._rounding is not None:
            active = self._rounding(active)
        return self._down(active.flatten(1))

"""Feed-forward blocks: one bounded SwiGLU, or routed and shared experts of the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.moe.api import Experts, PackedExperts
from flare_ray.device.ops.router.api import Scoring, route
from flare_ray.device.ops.router.softmax import softmax_route
from flare_ray.device.ops.swiglu.api import clamped_swiglu


class FeedForward(Protocol):
    """Rows [R, H] -> this rank's partial sum [R, H]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Run rows."""


class DenseFeedForward:
    """One gated feed-forward.

    Args:
        gate_up: [2 I, H], gate rows first.
        down: [H, I].
        limit: bound of the activation's inputs.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, *, limit: float) -> None:
        self._gate_up = Linear(gate_up)
        self._down = Linear(down)
        self._limit = limit

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        return self._down(clamped_swiglu(self._gate_up(x), limit=self._limit))


@dataclass(slots=True)
class Router:
    """weight [E, H] float32, bias [E] float32; top_k experts weighted to a sum of `scale`."""

    weight: Tensor
    bias: Tensor
    top_k: int
    scale: float
    scoring: Scoring = "sigmoid"


class MixtureOfExperts:
    """Routed experts beside shared ones; both partial sums are reduced together by the caller."""

    def __init__(self, router: Router, experts: Experts | PackedExperts) -> None:
        self._router = router
        self._experts = experts

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        router = self._router
        experts, weights = route(
            x,
            router.weight,
            router.bias,
            top_k=router.top_k,
            scale=router.scale,
            scoring=router.scoring,
        )
        return self._experts(x, experts, weights)


class GatedMixture:
    """Routed experts and one shared expert that every row weighs by itself.

    The shared expert stands behind the routed ones, as `parts` experts of their width, and is
    always chosen.

    Args:
        router: [E + 1, H] float32: a row per routed expert, then the shared one's gate.
        experts: E + parts experts, all of them routed, `top_k` + parts a row.
        top_k: routed experts per row.
        parts: experts that the shared one is cut into.
    """

    def __init__(
        self, router: Tensor, experts: Experts | PackedExperts, *, top_k: int, parts: int
    ) -> None:
        count = router.shape[0] - 1
        self._router = Linear(router)
        self._experts = experts
        self._top_k = top_k
        self._shared = torch.arange(count, count + parts, device=router.device).unsqueeze(0)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        logits = self._router(x.to(torch.float32))
        chosen, weights = softmax_route(logits[:, :-1], top_k=self._top_k)
        rows, parts = x.shape[0], self._shared.shape[1]
        gate = torch.sigmoid(logits[:, -1:])
        chosen = torch.cat((chosen, self._shared.expand(rows, parts)), dim=1)
        weights = torch.cat((weights, gate.expand(rows, parts)), dim=1)
        return self._experts(x, chosen, weights)

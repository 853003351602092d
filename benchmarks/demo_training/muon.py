"""Orthogonalised momentum for the hidden matrices: one update moves every direction of a matrix
alike, where Adam's follows the few directions with large gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial whose iterates carry singular values from (0, 1] to about one; steep at
zero, so that five iterations suffice, at the price of values between 0.7 and 1.2."""
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of an update before the learning rate: what Adam's has, so that both share one
rate."""


class HiddenMatrix:
    """A parameter seen as ``count`` matrices of its last two sizes.

    Args:
        parameter: [rows, columns], or stacked matrices [count rows, columns] or
            [count, rows, columns].
        count: matrices in it.
    """

    def __init__(self, parameter: nn.Parameter, count: int = 1) -> None:
        self.parameter, self.count = parameter, count
        self.columns = parameter.shape[-1]
        self.rows = parameter.numel() // self.columns // count

    def view(self, values: Tensor) -> Tensor:
        """[count, short, long] of a tensor of the parameter's shape."""
        stacked = values.view(self.count, self.rows, self.columns)
        return stacked.transpose(1, 2) if self.rows > self.columns else stacked

    @property
    def shape(self) -> tuple[int, int]:
        """Shorter and longer side."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Nearest matrices with singular values about one, of [N, short, long], by Newton-Schulz
    iterations; bfloat16 on a GPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Decoupled weight decay, Nesterov momentum, orthogonalised updates of equal size.

    ``torch.optim.Muon`` takes single matrices alone; the experts' lie stacked in one parameter.

    Args:
        matrices: what to train; matrices of one shape are treated as one batch.
        learning_rate: the same as Adam's beside it.
        momentum: of the gradients.
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[HiddenMatrix],
        learning_rate: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        self._matrices = list(matrices)
        defaults: dict[str, Any] = {
            "lr": learning_rate,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        super().__init__([m.parameter for m in self._matrices], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        (group,) = self.param_groups
        chosen: dict[tuple[int, int], list[HiddenMatrix]] = defaultdict(list)
        for matrix in self._matrices:
            if matrix.parameter.grad is not None:
                chosen[matrix.shape].append(matrix)
        for (_, longer), matrices in chosen.items():
            directions = torch.cat(
                [m.view(self._direction(m, group["momentum"])) for m in matrices]
            )
            steps = orthogonalised(directions) * (UPDATE_RMS * longer**0.5)
            for matrix, step in zip(
                matrices, steps.split([m.count for m in matrices]), strict=True
            ):
                weights = matrix.view(matrix.parameter)
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.sub_(step * group["lr"])

    def _direction(self, matrix: HiddenMatrix, momentum: float) -> Tensor:
        parameter = matrix.parameter
        assert parameter.grad is not None  # chosen by step
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)

"""Routed experts in two static-shape forms that give the same sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.swiglu.api import clamped_swiglu

BLOCK_ELEMENTS = 1 << 26
"""Largest intermediate, in elements (256 MiB of float32); longer row lists go in blocks."""


Rounding = Callable[[Tensor], Tensor]
"""What a product's inputs go through where its weights are quantised with their activations."""


@dataclass(slots=True)
class Routing:
    """experts [R, K] int64 and their weights [R, K] float32."""

    experts: Tensor
    weights: Tensor


def all_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shares: Tensor,
    *,
    limit: float,
    rounding: Rounding | None = None,
) -> Tensor:
    """Every expert on every row as two products; experts a row did not choose weigh 0.

    Args:
        x: [R, H].
        gate_up: [E, 2 I, H].
        down: [E, I, H].
        shares: [R, E] float32.
        rounding: of the activation, weighted by then.
    """
    experts, double, hidden = gate_up.shape
    first = gate_up.view(experts * double, hidden).t()
    second = down.view(-1, hidden)
    blocks = []
    for rows in _blocks(x.shape[0], experts * double):
        both = torch.mm(x[rows], first).view(-1, experts, double)
        active = clamped_swiglu(both, limit=limit).mul_(shares[rows].unsqueeze(-1))
        active = active if rounding is None else rounding(active)
        blocks.append(torch.mm(active.flatten(1), second))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def chosen_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    *,
    limit: float,
    rounding: Rounding | None = None,
) -> Tensor:
    """Gather the weights of each row's experts.

    Args:
        x: [R, H].
        gate_up: [E, 2 I, H].
        down: [E, I, H].
        routing: of the rows.
        rounding: of the activation, which is then weighted before the product.
    """
    top_k = routing.experts.shape[1]
    blocks = []
    for rows in _blocks(x.shape[0], top_k * gate_up[0].numel()):
        flat = routing.experts[rows].reshape(-1)
        part = x[rows]
        repeated = part.unsqueeze(1).expand(-1, top_k, -1).reshape(flat.shape[0], 1, -1)
        both = torch.bmm(repeated, gate_up.index_select(0, flat).transpose(1, 2))
        active = clamped_swiglu(both, limit=limit)
        if rounding is not None:
            active = rounding(active.mul_(routing.weights[rows].reshape(-1, 1, 1)))
        outputs = torch.bmm(active, down.index_select(0, flat)).view(part.shape[0], top_k, -1)
        if rounding is not None:
            blocks.append(outputs.sum(1))
            continue
        shares = routing.weights[rows].to(x.dtype).unsqueeze(1)
        blocks.append(torch.bmm(shares, outputs).squeeze(1))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _blocks(rows: int, elements_per_row: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // elements_per_row)
    return [slice(at, at + step) for at in range(0, rows, step)]

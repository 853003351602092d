"""Routing with ties, and every form of the experts against a loop over rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flare_ray.device.ops.moe import api as moe
from flare_ray.device.ops.moe import reference as moe_reference
from flare_ray.device.ops.moe.api import FUSED_EXPERTS_PER_CHOICE, Experts, ExpertWeights
from flare_ray.device.ops.router.api import route
from flare_ray.device.ops.swiglu.reference import clamped_swiglu
from flare_ray.errors import ContractViolation

ATOL = 5e-6
"""Sums of order one over a few hundred products; measured 1e-6."""
LIMIT = 0.8


pytestmark = pytest.mark.usefixtures("inference")


def test_routing_chooses_by_bias_and_weighs_without_it():
    x, weight, bias = torch.randn(6, 8), torch.randn(10, 8), 0.5 * torch.randn(10)
    experts, weights = route(x, weight, bias, top_k=3, scale=2.5)
    scores = torch.sigmoid(F.linear(x, weight))
    for row in range(6):
        order = sorted(range(10), key=lambda e, row=row: (-float(scores[row, e] + bias[e]), e))
        assert experts[row].tolist() == order[:3]
        chosen = scores[row, order[:3]]
        assert torch.allclose(weights[row], 2.5 * chosen / chosen.sum(), atol=1e-6)


def test_equal_scores_go_to_the_lower_expert():
    experts, weights = route(
        torch.zeros(2, 4), torch.randn(9, 4), torch.zeros(9), top_k=4, scale=1.0
    )
    assert experts.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.allclose(weights, torch.full((2, 4), 0.25))


def loop(x, held: ExpertWeights, shared: int, experts, weights) -> torch.Tensor:
    """Row by row and expert by expert, in float64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    total, double, _ = held.gate_up.shape
    for row in range(x.shape[0]):
        shares = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        shares |= dict.fromkeys(range(total - shared, total), 1.0)
        for expert, share in shares.items():
            both = held.gate_up[expert].double() @ x[row].double()
            active = clamped_swiglu(both[: double // 2], both[double // 2 :], limit=LIMIT)
            result[row] += share * (active @ held.down[expert].double())
    return result.float()


@pytest.mark.parametrize("routed", [FUSED_EXPERTS_PER_CHOICE * 2, 40])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_experts_equal_a_loop(monkeypatch, routed, shared, rows):
    """8 routed: fused; 40 routed: gathered for 1 and 5 rows, all of them for 30."""
    monkeypatch.setattr(moe, "_compiles", lambda weight: False)  # its own test: test_compiled.py
    held = ExpertWeights(
        torch.randn(routed + shared, 12, 16) / 4, torch.randn(routed + shared, 6, 16)
    )
    experts = torch.stack([torch.randperm(routed)[:2] for _ in range(rows)])
    weights, x = torch.rand(rows, 2), torch.randn(rows, 16)
    op = Experts(held, shared=shared, top_k=2, limit=LIMIT)
    wanted = loop(x, held, shared, experts, weights)
    assert torch.allclose(op(x, experts, weights), wanted, atol=ATOL)
    monkeypatch.setattr(moe_reference, "BLOCK_ELEMENTS", 3 * 2 * 12 * 16)
    assert torch.allclose(op(x, experts, weights), wanted, atol=ATOL)


def test_each_form_is_the_one_meant(monkeypatch):
    monkeypatch.setattr(moe, "_compiles", lambda weight: False)

    def op(routed: int) -> Experts:
        held = ExpertWeights(torch.zeros(routed, 12, 16), torch.zeros(routed, 6, 16))
        return Experts(held, shared=0, top_k=2, limit=LIMIT)

    assert op(8)._routed is None and op(40)._routed is not None


def test_shapes_are_checked():
    held = ExpertWeights(torch.zeros(8, 12, 16), torch.zeros(8, 5, 16))
    with pytest.raises(ContractViolation, match=r"down has shape \[8, 5, 16\]"):
        Experts(held, shared=0, top_k=2, limit=LIMIT)
    op = Experts(
        ExpertWeights(torch.zeros(8, 12, 16), torch.zeros(8, 6, 16)),
        shared=0,
        top_k=2,
        limit=LIMIT,
    )
    with pytest.raises(ContractViolation, match="experts has shape"):
        op(torch.zeros(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 2))

"""Grouped experts on CUDA, in every format, against the reference on dequantised weights."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.key_rounding.api import round_fp8
from flare_ray.device.ops.moe import reference
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, PackedExperts, SharedExperts
from flare_ray.device.ops.moe.packed import Fp8Stack, Mxfp4Stack, Nvfp4Stack
from flare_ray.device.weights.formats.fp8_block import quantise_fp8_block
from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4
from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4
from tests.gpu.kernels import BFLOAT16_L2, FLOAT32_L2, error, replayed

pytestmark = pytest.mark.gpu

EXPERTS, WIDTH, HIDDEN, TOP_K, LIMIT = 12, 256, 512, 3, 4.0
ROWS = (1, 2, 7, 24, 25, 64, 130)
ROUNDED_L2 = 2e-2


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS, device="cuda")[:TOP_K] for _ in range(rows)])
    return ids, torch.rand((rows, TOP_K), device="cuda")


def wanted(x, gate_up, down, ids, weights, *, shared=0):
    shares = torch.zeros((x.shape[0], gate_up.shape[0]), device="cuda").scatter_(1, ids, weights)
    if shared:
        shares[:, -shared:] = 1.0
    return reference.all_experts(x.float(), gate_up.float(), down.float(), shares, limit=LIMIT)


@pytest.mark.parametrize("rows", [*ROWS, 600])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, BFLOAT16_L2), (torch.float32, 3e-6)])
def test_plain_experts_equal_the_reference(rows, dtype, most):
    torch.manual_seed(rows)
    made = {"dtype": dtype, "device": "cuda"}
    gate_up = torch.randn((EXPERTS + 1, 2 * WIDTH, HIDDEN), **made) / 16
    down = torch.randn((EXPERTS + 1, WIDTH, HIDDEN), **made) / 16
    x = torch.randn((rows, HIDDEN), **made)
    ids, weights = routing(rows)
    experts = Experts(ExpertWeights(gate_up, down), shared=1, top_k=TOP_K, limit=LIMIT)
    got = experts(x, ids, weights)
    assert error(got, wanted(x, gate_up, down, ids, weights, shared=1)) <= most
    assert torch.equal(replayed(lambda: experts(x, ids, weights)), got)


def nvfp4(rows: int, columns: int):
    return quantise_nvfp4(torch.randn((rows, columns), device="cuda"))


def nvfp4_stack():
    stack = Nvfp4Stack.empty(EXPERTS, WIDTH, HIDDEN, torch.device("cuda"))
    gate_up = torch.empty((EXPERTS, 2 * WIDTH, HIDDEN), device="cuda")
    down = torch.empty((EXPERTS, WIDTH, HIDDEN), device="cuda")
    for e in range(EXPERTS):
        parts = [nvfp4(WIDTH, HIDDEN), nvfp4(WIDTH, HIDDEN), nvfp4(HIDDEN, WIDTH)]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.block_scale for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].block_scale
        factors = [p.global_multiplier / 16 * (1 + n) for n, p in enumerate(parts)]
        stack.factors[e] = torch.stack(factors)
        values = [p.dequantise(torch.float32) / 16 * (1 + n) for n, p in enumerate(parts)]
        gate_up[e], down[e] = torch.cat(values[:2]), values[2].t()
    return stack, gate_up, down


@pytest.mark.parametrize("rows", ROWS)
def test_nvfp4_experts_equal_the_dequantised_ones(rows):
    torch.manual_seed(rows)
    stack, gate_up, down = nvfp4_stack()
    x = torch.randn((rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
    x[:, ::7] *= 300  # groups whose channels differ by many binades
    ids, weights = routing(rows)
    experts = PackedExperts(stack, None, top_k=TOP_K, limit=LIMIT)
    got = experts(x, ids, weights)
    assert error(got, wanted(x, gate_up, down, ids, weights)) <= BFLOAT16_L2
    assert torch.equal(replayed(lambda: experts(x, ids, weights)), got)


@pytest.mark.parametrize("rows", [1, 9])
def test_both_nvfp4_kernels_agree_and_shared_experts_are_added(rows):
    from flare_ray.device.ops.moe.fp4.triton import Fp4Experts

    torch.manual_seed(rows)
    stack, *_ = nvfp4_stack()
    x = torch.randn((rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
    ids, weights = routing(rows)
    few, many = (Fp4Experts(stack, limit=LIMIT, few_rows=n) for n in (rows, 0))
    alone = few(x, ids, weights)
    assert error(alone, many(x, ids, weights)) <= BFLOAT16_L2
    assert error(few(x, ids, weights, x), alone.float() + x.float()) <= BFLOAT16_L2


def mxfp4_stack():
    stack = Mxfp4Stack.empty(EXPERTS, WIDTH, HIDDEN, torch.device("cuda"))
    gate_up = torch.empty((EXPERTS, 2 * WIDTH, HIDDEN), device="cuda")
    down = torch.empty((EXPERTS, WIDTH, HIDDEN), device="cuda")
    for e in range(EXPERTS):
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        scale = 2.0 ** (e - 8)  # experts far apart, as scales of two's powers may be
        parts = [quantise_mxfp4(torch.randn(s, device="cuda") * scale) for s in shapes]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.exponents for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].exponents
        values = [p.dequantise(torch.float32) for p in parts]
        gate_up[e], down[e] = torch.cat(values[:2]), values[2].t()
    return stack, gate_up, down


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rounding", [None, round_fp8], ids=["plain", "rounded"])
def test_mxfp4_experts_equal_the_dequantised_ones(rows, rounding):
    torch.manual_seed(rows)
    stack, gate_up, down = mxfp4_stack()
    x = torch.randn((rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
    ids, weights = routing(rows)
    shared = ExpertWeights(gate_up[:1].bfloat16() / 4, down[:1].bfloat16() / 4)
    experts = PackedExperts(
        stack, SharedExperts(shared), top_k=TOP_K, limit=LIMIT, rounding=rounding
    )
    got = experts(x, ids, weights)
    read = x.float() if rounding is None else rounding(x.float())
    one = reference.Routing(torch.zeros_like(ids[:, :1]), torch.ones_like(weights[:, :1]))
    expected = reference.chosen_experts(
        read,
        gate_up,
        down,
        reference.Routing(ids, weights),
        limit=LIMIT,
        rounding=rounding,
    ) + reference.chosen_experts(
        read, shared.gate_up.float(), shared.down.float(), one, limit=LIMIT, rounding=rounding
    )
    # a rounding to three bits may go the other way for values beside a half-way point
    most = BFLOAT16_L2 if rounding is None else ROUNDED_L2
    assert error(got, expected) <= most
    assert torch.equal(replayed(lambda: experts(x, ids, weights)), got)


def test_weighted_shared_experts_join_packed_ones():
    torch.manual_seed(1)
    stack, gate_up, down = nvfp4_stack()
    x = torch.randn((5, HIDDEN), dtype=torch.bfloat16, device="cuda")
    ids, weights = routing(5)
    shared = ExpertWeights(gate_up[:2].bfloat16(), down[:2].bfloat16())
    experts = PackedExperts(stack, SharedExperts(shared, weighted=True), top_k=TOP_K, limit=LIMIT)
    listed = torch.tensor([[EXPERTS, EXPERTS + 1]], device="cuda").expand(5, 2)
    every, shares = torch.cat((ids, listed), 1), torch.cat((weights, weights[:, :2]), 1)
    got = experts(x, every, shares)
    both = [torch.cat((a, b.float())) for a, b in ((gate_up, shared.gate_up), (down, shared.down))]
    assert error(got, wanted(x, *both, every, shares)) <= BFLOAT16_L2
    assert torch.equal(replayed(lambda: experts(x, every, shares)), got)


@pytest.mark.parametrize("rows", ROWS)
def test_fp8_experts_equal_the_dequantised_ones(rows):
    torch.manual_seed(rows)
    stack = Fp8Stack.empty(EXPERTS, WIDTH, HIDDEN, torch.device("cuda"))
    gate_up = torch.empty((EXPERTS, 2 * WIDTH, HIDDEN), device="cuda")
    down = torch.empty((EXPERTS, WIDTH, HIDDEN), device="cuda")
    for e in range(EXPERTS):
        both = quantise_fp8_block(torch.randn(2 * WIDTH, HIDDEN) / 16)
        out = quantise_fp8_block(torch.randn(HIDDEN, WIDTH) / 16)
        stack.gate_up[e], stack.gate_up_scale[e] = both.weight.cuda(), both.scale_inv.cuda()
        stack.down[e], stack.down_scale[e] = out.weight.cuda(), out.scale_inv.cuda()
        gate_up[e] = both.dequantise(torch.float32)
        down[e] = out.dequantise(torch.float32).t()
    x = torch.randn((rows, HIDDEN), dtype=torch.bfloat16, device="cuda")
    ids, weights = routing(rows)
    experts = PackedExperts(stack, None, top_k=TOP_K, limit=LIMIT)
    got = experts(x, ids, weights)
    assert error(got, wanted(x, gate_up, down, ids, weights)) <= BFLOAT16_L2
    assert torch.equal(replayed(lambda: experts(x, ids, weights)), got)


def test_float32_bound_is_not_met_by_bfloat16():
    """Negative control of the tolerances."""
    x = torch.randn(4096, device="cuda")
    assert FLOAT32_L2 < error(x.bfloat16(), x) < BFLOAT16_L2

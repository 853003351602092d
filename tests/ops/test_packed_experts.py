"""Packed experts on CPU against dequantised ones, bit by bit, and rows of tables off the device."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.key_rounding.api import round_fp8
from flare_ray.device.ops.moe.api import Experts, ExpertWeights, PackedExperts, SharedExperts
from flare_ray.device.ops.moe.packed import Mxfp4Stack, Nvfp4Stack
from flare_ray.device.ops.row_gather.api import RowGather, StoredRows
from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4
from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4
from flare_ray.errors import ContractViolation

pytestmark = pytest.mark.usefixtures("inference")

EXPERTS, WIDTH, HIDDEN, TOP_K, LIMIT = 6, 32, 96, 2, 0.8
CPU = torch.device("cpu")


def nvfp4_stack(*, divides: bool) -> Nvfp4Stack:
    stack = Nvfp4Stack.empty(EXPERTS, WIDTH, HIDDEN, CPU)
    stack.divides = divides
    for e in range(EXPERTS):
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        parts = [
            quantise_nvfp4(torch.randn(shape) * (n + 1), global_divides=divides)
            for n, shape in enumerate(shapes)
        ]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.block_scale for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].block_scale
        stack.factors[e] = torch.stack([p.global_scale for p in parts])
        gate_up, down = stack.dequantised(e)
        values = [p.dequantise(torch.float32) for p in parts]
        assert torch.equal(gate_up, torch.cat(values[:2])) and torch.equal(down, values[2])
    return stack


def mxfp4_stack() -> Mxfp4Stack:
    stack = Mxfp4Stack.empty(EXPERTS, WIDTH, HIDDEN, CPU)
    for e in range(EXPERTS):
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        parts = [quantise_mxfp4(torch.randn(shape)) for shape in shapes]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.exponents for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].exponents
    return stack


STACKS = {
    "nvfp4": lambda: nvfp4_stack(divides=False),
    "nvfp4-divisor": lambda: nvfp4_stack(divides=True),
    "mxfp4": mxfp4_stack,
}


def plain(stack, shared: ExpertWeights | None) -> ExpertWeights:
    values = [stack.dequantised(e) for e in range(EXPERTS)]
    gate_up, down = torch.stack([v[0] for v in values]), torch.stack([v[1].t() for v in values])
    if shared is None:
        return ExpertWeights(gate_up, down)
    return ExpertWeights(torch.cat((gate_up, shared.gate_up)), torch.cat((down, shared.down)))


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
    return ids, torch.rand(rows, TOP_K)


@pytest.mark.parametrize("form", list(STACKS))
@pytest.mark.parametrize("rounding", [None, round_fp8], ids=["as-is", "rounded"])
@pytest.mark.parametrize("shared", ["none", "counted", "weighted"])
def test_packed_experts_equal_dequantised_ones_bit_by_bit(form, rounding, shared):
    stack = STACKS[form]()
    extra = ExpertWeights(torch.randn(2, 2 * WIDTH, HIDDEN), torch.randn(2, WIDTH, HIDDEN))
    beside = None if shared == "none" else extra
    weighted = shared == "weighted"
    packed = PackedExperts(
        stack,
        None if beside is None else SharedExperts(beside, weighted),
        top_k=TOP_K,
        limit=LIMIT,
        rounding=rounding,
    )
    whole = Experts(
        plain(stack, beside),
        shared=2 if shared == "counted" else 0,
        top_k=TOP_K + 2 * weighted,
        limit=LIMIT,
        rounding=rounding,
    )
    for rows in (1, 7, 70):
        x, (ids, weights) = torch.randn(rows, HIDDEN), routing(rows)
        if weighted:
            ids = torch.cat((ids, torch.tensor([[EXPERTS, EXPERTS + 1]]).expand(rows, 2)), 1)
            weights = torch.cat((weights, torch.rand(rows, 2)), 1)
        assert torch.equal(packed(x, ids, weights), whole(x, ids, weights))


def test_experts_with_rounded_inputs_equal_the_equations():
    held = plain(mxfp4_stack(), None)
    x, (ids, weights) = torch.randn(5, HIDDEN), routing(5)
    got = Experts(held, shared=0, top_k=TOP_K, limit=LIMIT, rounding=round_fp8)(x, ids, weights)
    read = round_fp8(x)
    for row in range(5):
        total = torch.zeros(HIDDEN)
        for e, share in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (held.gate_up[e] @ read[row]).chunk(2)
            active = (
                share * up.clamp(-LIMIT, LIMIT) * torch.nn.functional.silu(gate.clamp(max=LIMIT))
            )
            total += round_fp8(active) @ held.down[e]
        assert torch.allclose(got[row], total, atol=2e-4)


def test_a_bit_of_one_code_shows():
    """Negative control."""
    stack = nvfp4_stack(divides=False)
    x, ids, weights = torch.randn(1, HIDDEN), torch.tensor([[3, 1]]), torch.ones(1, TOP_K)
    packed = PackedExperts(stack, None, top_k=TOP_K, limit=LIMIT)
    before = packed(x, ids, weights)
    stack.down[3, 0, 0] ^= 4
    assert not torch.equal(packed(x, ids, weights), before)
    stack.down[0, 0, 0] ^= 4  # not chosen
    stack.down[3, 0, 0] ^= 4
    assert torch.equal(packed(x, ids, weights), before)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parts", [1, 4])
def test_rows_are_copied_out_of_all_parts(kept, parts):
    table = torch.randn(parts * 9, 24).to(kept)
    gather = RowGather(StoredRows(table.chunk(parts)), dtype=torch.float32, device=CPU)
    numbers = torch.randint(0, parts * 9, (50,))
    assert torch.equal(gather(numbers), table[numbers].float())


def test_packed_rows_are_scaled_group_by_group():
    table = torch.randn(18, 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 140, (18, 2), dtype=torch.uint8)
    stored = StoredRows(table.chunk(2), exponents.chunk(2))
    gather = RowGather(stored, dtype=torch.float32, device=CPU)
    scales = torch.pow(2.0, exponents.double() - 127).repeat_interleave(32, 1)
    numbers = torch.randint(0, 18, (50,))
    assert torch.equal(gather(numbers).double(), (table.double() * scales)[numbers])


def test_rows_with_one_scale_are_multiplied_by_it():
    table = torch.randn(18, 64).to(torch.float8_e4m3fn)
    gather = RowGather(StoredRows(table.chunk(2), scale=0.0371), dtype=torch.float32, device=CPU)
    numbers = torch.randint(0, 18, (50,))
    assert torch.equal(gather(numbers), (table.float() * 0.0371)[numbers])


def test_parts_of_unequal_length_are_refused():
    parts = (torch.zeros(3, 8), torch.zeros(4, 8))
    with pytest.raises(ContractViolation, match="differ"):
        RowGather(StoredRows(parts), dtype=torch.float32, device=CPU)

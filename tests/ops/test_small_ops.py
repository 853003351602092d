"""Linear, norms, activation, short convolution, stream mixing, state rows: against definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flare_ray.device.ops.hyper_connection import reference as mixing
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape, mix_out
from flare_ray.device.ops.linear.api import Linear, concatenated
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.rmsnorm.reference import rmsnorm
from flare_ray.device.ops.short_conv.api import short_conv
from flare_ray.device.ops.state_rows.api import WIDE_ROW_BYTES, scatter_rows
from flare_ray.device.ops.swiglu.api import clamped_swiglu
from flare_ray.device.ops.swiglu.reference import clamped_swiglu as plain_swiglu
from flare_ray.errors import ContractViolation

ATOL = 2e-6
"""Float32 results of order one: rounding of another summation order, measured 1e-6."""


pytestmark = pytest.mark.usefixtures("inference")


def close(got: torch.Tensor, wanted: torch.Tensor, atol: float = ATOL) -> bool:
    return got.shape == wanted.shape and bool(torch.allclose(got, wanted, rtol=1e-5, atol=atol))


# Linear


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("shape", [(8, 16), (800, 256)])
def test_linear_equals_the_plain_product(rows, shape):
    weight, x = torch.randn(shape) / 16, torch.randn(rows, shape[1])
    assert close(Linear(weight)(x), F.linear(x.double(), weight.double()).float(), 1e-5)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("shape", [(64, 16), (63, 1), (129, 40), (5, 300)])
def test_rows_are_multiplied_alike_whatever_stands_beside_them(shape, narrow):
    """Every block of rows and both stored types; bit for bit, and against float64."""
    weight = torch.randn(shape)
    weight = weight.to(torch.bfloat16).float() if narrow else weight
    linear, x = Linear(weight), torch.randn(15, shape[1])
    assert (linear._kept.dtype == torch.bfloat16) == narrow
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for rows in range(1, 16):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    wanted = F.linear(x.double(), weight.double()).float()
    assert torch.allclose(alone, wanted, rtol=1e-5, atol=1e-4)


def test_linear_takes_a_transposed_view_and_takes_rows_of_a_wider_matrix():
    weight, wide = torch.randn(256, 800) / 16, torch.randn(3, 300)
    got = Linear(weight.t())(wide[:, :256])
    assert close(got, F.linear(wide[:, :256], weight.t()), 1e-5)


def test_concatenated_outputs_follow_in_order():
    first, second, x = torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 8)
    wanted = torch.cat((F.linear(x, first), F.linear(x, second)), dim=1)
    assert close(concatenated(first, second)(x), wanted)


# Norm and activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_equals_its_definition(dtype):
    weight, x = torch.randn(48).to(dtype), (3 * torch.randn(5, 48)).to(dtype)
    got, wanted = RmsNorm(weight, eps=1e-5)(x), rmsnorm(x, weight, eps=1e-5)
    assert got.dtype == dtype
    assert torch.allclose(
        got.float(), wanted.float(), rtol=1e-2 if dtype != torch.float32 else 1e-5
    )


def test_rmsnorm_of_a_tiny_row_is_bounded_by_eps():
    x = torch.full((1, 16), 1e-6)
    assert close(RmsNorm(torch.ones(16), eps=1e-5)(x), rmsnorm(x, torch.ones(16), eps=1e-5))


def test_swiglu_bounds_gate_from_above_only_and_up_on_both_sides():
    gate = torch.tensor([-30.0, -1.0, 0.0, 5.0, 30.0])
    up = torch.tensor([30.0, -30.0, 1.0, 2.0, -3.0])
    got = clamped_swiglu(torch.cat((gate, up)), limit=10.0)
    wanted = torch.tensor(
        [
            F.silu(torch.tensor(-30.0)) * 10,
            F.silu(torch.tensor(-1.0)) * -10,
            0.0,
            F.silu(torch.tensor(5.0)) * 2,
            F.silu(torch.tensor(10.0)) * -3,
        ]
    )
    assert close(got, wanted)
    assert close(got, plain_swiglu(gate, up, limit=10.0))
    with pytest.raises(ContractViolation, match="even"):
        clamped_swiglu(torch.zeros(2, 3), limit=1.0)


# Short convolution


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_short_conv_equals_a_depthwise_convolution(kernel):
    joined, taps = torch.randn(2, kernel - 1 + 5, 6), torch.randn(kernel, 6)
    wanted = F.conv1d(joined.transpose(1, 2), taps.t().unsqueeze(1), groups=6)
    assert close(short_conv(joined, taps), F.silu(wanted.transpose(1, 2)))


def test_short_conv_refuses_history_without_a_new_row():
    with pytest.raises(ContractViolation, match="at least one new row"):
        short_conv(torch.zeros(1, 3, 4), torch.zeros(4, 4))


# Stream mixing


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 12), (2, 1)])
def test_mixing_equals_its_definition(streams, iterations):
    hidden, rows = 24, 5
    count = (2 + streams) * streams
    projection = torch.randn(count, streams * hidden) / 8
    base, scale = torch.randn(count), 1 + torch.randn(3) / 4
    shape = SinkhornShape(iterations, 1e-6, 1e-5)
    site_op = HyperConnection(projection, base, scale, streams=streams, shape=shape)
    state, block = torch.randn(rows, streams, hidden), torch.randn(rows, hidden)
    x, site = site_op.mix_in(state)
    raw = mixing.projected(state, projection, norm_eps=1e-5)
    pre, post, mix = mixing.coefficients(raw, base, scale, iterations=iterations, eps=1e-6)
    assert close(x, (pre.unsqueeze(-1) * state).sum(1), 1e-5)
    assert close(site.post, post)
    assert close(site.mix, mix)
    assert close(mix_out(block, state, site), mixing.mix_out(block, state, post, mix), 1e-5)


def test_mix_is_doubly_stochastic_and_applied_transposed():
    mix = mixing.sinkhorn(3 * torch.randn(6, 4, 4), iterations=200, eps=1e-6)
    assert torch.allclose(mix.sum(-1), torch.ones(6, 4), atol=1e-3)
    assert torch.allclose(mix.sum(-2), torch.ones(6, 4), atol=1e-3)
    state = torch.randn(1, 2, 3)
    only = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    moved = mixing.mix_out(torch.zeros(1, 3), state, torch.zeros(1, 2), only)
    assert torch.equal(moved[0, 1], state[0, 0])
    assert not moved[0, 0].any()


# State rows


@pytest.mark.parametrize("width", [3, WIDE_ROW_BYTES // 4, WIDE_ROW_BYTES // 4 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scattered_rows_arrive_bit_by_bit(width, dtype):
    target, rows = torch.zeros(6, 2, width, dtype=dtype), torch.randn(2, 2, width).to(dtype)
    rows[0, 0, 0] = float("nan")
    scatter_rows(target, torch.tensor([4, 1]), rows)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(target[[4, 1]].view(bits), rows.view(bits))
    assert not target[[0, 2, 3, 5]].any()


def test_scattered_rows_must_fit():
    with pytest.raises(ContractViolation, match=r"rows has shape \[1, 4\], expected \[2, 4\]"):
        scatter_rows(torch.zeros(3, 4), torch.tensor([0, 1]), torch.zeros(1, 4))

"""Stream mixing, routing, norms and activations on CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flare_ray.device.ops.hyper_connection import reference as streams_reference
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape, mix_out
from flare_ray.device.ops.rmsnorm import reference as norm_reference
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.router import reference as router_reference
from flare_ray.device.ops.router.api import route
from flare_ray.device.ops.swiglu import reference as swiglu_reference
from flare_ray.device.ops.swiglu.api import clamped_swiglu
from tests.gpu.kernels import BFLOAT16_L2, FLOAT32_L2, error

pytestmark = pytest.mark.gpu

SHAPE = SinkhornShape(20, 1e-6, 1e-5)


@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("hidden", [4096, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_site_equals_the_reference(rows, hidden, dtype):
    torch.manual_seed(rows)
    projection = torch.randn((24, 4 * hidden), device="cuda") * 0.02
    base, scale = torch.randn(24, device="cuda"), torch.rand(3, device="cuda") + 0.5
    streams = torch.randn((rows, 4, hidden), device="cuda").to(dtype)
    site = HyperConnection(projection, base, scale, streams=4, shape=SHAPE)
    x, mix = site.mix_in(streams)
    flat = streams.double().flatten(1)
    flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-5)
    raw = F.linear(flat, projection.double())
    pre, post, wanted = streams_reference.coefficients(
        raw, base.double(), scale.double(), iterations=20, eps=1e-6
    )
    assert error(mix.post, post) <= 1e-5 and error(mix.mix, wanted) <= 1e-5
    most = BFLOAT16_L2 if dtype == torch.bfloat16 else 1e-5
    assert error(x, (pre.unsqueeze(2) * streams.double()).sum(1)) <= most
    block = torch.randn((rows, hidden), device="cuda").to(dtype)
    mixed = streams_reference.mix_out(block, streams, post.float(), wanted.float())
    assert error(mix_out(block, streams, mix), mixed) <= most


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_router_breaks_ties_to_the_lowest_expert(scoring):
    torch.manual_seed(5)
    weight, bias = torch.randn((288, 64), device="cuda"), torch.randn(288, device="cuda") * 0.01
    weight[100:140], bias[100:140] = weight[7], bias[7]
    x = torch.randn((48, 64), device="cuda")
    got = route(x, weight, bias, top_k=8, scale=2.5, scoring=scoring)
    wanted = router_reference.route(x, weight, bias, top_k=8, scale=2.5, scoring=scoring)
    assert torch.equal(got[0], wanted[0])
    assert error(got[1], wanted[1]) <= FLOAT32_L2


def test_router_puts_up_with_rows_that_are_not_numbers():
    x = torch.full((2, 16), float("nan"), device="cuda")
    chosen, _ = route(
        x, torch.randn((20, 16), device="cuda"), torch.zeros(20, device="cuda"), top_k=4, scale=1.0
    )
    assert chosen.min() >= 0 and chosen.max() < 20


@pytest.mark.parametrize("size", [4096, 1536, 512, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_equals_its_definition(size, dtype):
    x = torch.randn((9, size + 24), device="cuda").to(dtype)[:, 8 : 8 + size]
    weight = torch.randn(size, device="cuda").to(dtype)
    got = RmsNorm(weight, eps=1e-5)(x)
    wanted = norm_reference.rmsnorm(x.float(), weight.float(), eps=1e-5)
    assert error(got, wanted) <= (BFLOAT16_L2 if dtype == torch.bfloat16 else FLOAT32_L2)


def test_swiglu_equals_its_definition():
    both = torch.randn((5, 3, 2 * 700), device="cuda") * 8
    wanted = swiglu_reference.clamped_swiglu(*both.chunk(2, -1), limit=10.0)
    assert error(clamped_swiglu(both, limit=10.0), wanted) <= FLOAT32_L2


def test_products_of_the_router_are_float32():
    """Negative control: TF32 would flip choices."""
    assert not torch.backends.cuda.matmul.allow_tf32
    x, weight = torch.randn((8, 4096), device="cuda"), torch.randn((288, 4096), device="cuda")
    assert error(F.linear(x, weight), F.linear(x.double(), weight.double())) <= 1e-5

"""Compiled CPU operators of one row: they equal the torch forms, and a row's bits do not depend on
the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flare_ray.device.ops.engram import api as engram
from flare_ray.device.ops.hyper_connection import api as mixing
from flare_ray.device.ops.key_rounding import api as rounding
from flare_ray.device.ops.key_rounding import reference as plain_rounding
from flare_ray.device.ops.linear.api import Linear, Parts
from flare_ray.device.ops.pooled_index import api as pooled
from flare_ray.device.ops.pooled_index import reference as plain_pooled
from flare_ray.device.ops.rotary_pairs import api as rotary
from flare_ray.device.ops.router import api as router
from flare_ray.device.ops.router import reference as plain_router
from flare_ray.device.ops.sink_attention import api as sink
from flare_ray.device.ops.sink_attention import reference as plain_sink
from flare_ray.device.ops.swiglu import api as swiglu

TOLERANCE = 2e-5
ROWS = 23
GENERATOR = torch.Generator().manual_seed(5)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


@dataclass
class Case:
    """ours: rows [R, ...] of each operand -> rows; plain: the same in torch, of any type."""

    operands: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]


def rotated(x: Tensor, phase: Tensor) -> Tensor:
    turned = torch.view_as_complex(x[..., -8:].unflatten(-1, (-1, 2)).contiguous()) * phase
    return torch.cat((x[..., :-8], torch.view_as_real(turned).flatten(-2)), -1)


def written(streams: Tensor, joint: Tensor) -> Tensor:
    """`gated_write` in float64, which has no compiled form."""
    return engram.gated_write(streams.double(), joint.double(), FACTOR, eps=1e-6).float()


FACTOR, SINK = noise(3, 17), noise(5)
PARTS, WEIGHT, BIAS = noise(3, 70, 11), noise(9, 33), noise(9)
POOL, INDEX = noise(40, 20), torch.randint(-9, 40, (ROWS, 30), generator=GENERATOR)
OTHERS = torch.randint(-1, 40, (ROWS, 7), generator=GENERATOR)
PHASE = torch.polar(torch.ones(ROWS, 4), noise(ROWS, 4))
KEYS = noise(1, 90, 12)


def attended(query: Tensor, near: Tensor, far: Tensor, attend=sink.sink_attention) -> Tensor:
    lists = (sink.Listed(POOL, near.clamp(min=-1)), sink.Listed(POOL.flip(0), far))
    return attend(query, lists, SINK, scale=0.4)


def scored(query: Tensor, weights: Tensor, score=pooled.pool_scores) -> Tensor:
    return score(query.unsqueeze(0), KEYS, weights.unsqueeze(0)).squeeze(0)


CASES = {
    "sink attention": Case(
        (noise(ROWS, 5, 20), INDEX, OTHERS),
        attended,
        lambda *given: attended(*given, attend=plain_sink.sink_attention),
    ),
    "rotation": Case((noise(ROWS, 21), PHASE), rotary.rotate, rotated),
    "collapsed streams": Case(
        (noise(ROWS, 3, 17), noise(ROWS, 3)),
        mixing.collapse,
        lambda streams, pre: torch.einsum("rn,rnh->rh", pre, streams),
    ),
    "gated write": Case(
        (noise(ROWS, 3, 17), noise(ROWS, 4 * 17)),
        lambda streams, joint: engram.gated_write(streams, joint, FACTOR, eps=1e-6),
        written,
    ),
    "product": Case((noise(ROWS, 33),), Linear(WEIGHT), lambda x: x @ WEIGHT.t()),
    "products of parts": Case(
        (noise(ROWS, 33),),
        Parts(PARTS),
        lambda x: torch.einsum("rgi,goi->rgo", x.unflatten(1, (3, 11)), PARTS).flatten(1),
    ),
    "scores of pools": Case(
        (noise(ROWS, 7, 12), noise(ROWS, 7)),
        scored,
        lambda *given: scored(*given, score=plain_pooled.pool_scores),
    ),
    "weights of experts": Case(
        (noise(ROWS, 33),),
        lambda x: router.route(x, WEIGHT, BIAS, top_k=3, scale=2.0)[1],
        lambda x: plain_router.route(x, WEIGHT, BIAS, top_k=3, scale=2.0)[1],
    ),
    "bounded SwiGLU": Case(
        (noise(ROWS, 2 * 21) * 4,),
        lambda x: swiglu.clamped_swiglu(x, limit=3.0),
        lambda x: torch.nn.functional.silu(x[:, :21].clamp(max=3.0)) * x[:, 21:].clamp(-3.0, 3.0),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Every operator in turn."""
    return CASES[request.param]


def test_operator_equals_its_torch_form(case):
    got, wanted = case.ours(*case.operands), case.plain(*case.operands)
    assert torch.allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("some", [1, 2, 3, 5, 8, 13])
def test_rows_have_the_same_bits_in_any_company(case, some):
    together = case.ours(*case.operands)
    for at in range(0, ROWS - some + 1, some):
        part = case.ours(*(operand[at : at + some] for operand in case.operands))
        assert torch.equal(part, together[at : at + some])


@pytest.mark.parametrize("hidden", [0, 1, 40])
def test_hidden_entries_leave_no_trace_in_the_sums(hidden):
    query, near, far = CASES["sink attention"].operands
    padding = torch.full((ROWS, hidden), -1)
    padded = torch.cat((padding, near, padding), 1), torch.cat((far, padding), 1)
    assert torch.equal(attended(query, *padded), attended(query, near, far))


@pytest.mark.parametrize("name", ["round_fp8", "round_fp4", "round_fp4_e4m3"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 0.01, 1.0, 300.0, 1e20])
def test_compiled_roundings_have_the_bits_of_the_torch_forms(name, scale):
    ours, plain = getattr(rounding, name), getattr(plain_rounding, name)
    x = noise(300, 64) * scale
    x[:50] = torch.randint(-999, 999, (50, 64), generator=GENERATOR) * 2.0**-7 * scale
    x[50:52], x[52, 3], x[53, 9] = 0.0, -0.0, float("nan")
    group = 16 if name == "round_fp4_e4m3" else 32
    wanted = plain(x.unflatten(-1, (-1, group))).flatten(-2)
    got = ours(x, group=group)
    assert torch.equal(got.isnan(), wanted.isnan())
    kept = ~wanted.isnan()
    assert torch.equal(got[kept].view(torch.int32), wanted[kept].view(torch.int32))


@pytest.mark.parametrize("count", [1, 7, 64, 200])
def test_chosen_pools_are_those_of_a_sort(count):
    scores = torch.randint(0, 6, (ROWS, 130), generator=GENERATOR).float().log()
    visible = torch.randint(0, 131, (ROWS,), generator=GENERATOR)
    got = pooled.best_pools(scores, visible, count=count)
    wanted = plain_pooled.best_pools(scores, visible, count=count)
    ordered = torch.where(wanted < 0, 1000, wanted).sort(dim=1).values
    assert torch.equal(got, ordered.masked_fill(ordered == 1000, -1))

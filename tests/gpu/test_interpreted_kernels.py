"""The CUDA kernels' arithmetic without a CUDA device: Triton's interpreter, float32, small sizes.

Runs where `triton` is installed and no CUDA device is seen (the interpreter replaces the compiler
for the whole process). Its bfloat16 arithmetic is wrong, hence float32 alone.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a CUDA device is seen: test_kernel_*.py compare there", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which the cuda extra brings", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from flare_ray.device.layers.rows import join_window, round_rows
from flare_ray.device.ops.hyper_connection import reference as streams_reference
from flare_ray.device.ops.hyper_connection import triton as streams
from flare_ray.device.ops.indexed_attention import reference as attention_reference
from flare_ray.device.ops.indexed_attention import triton as attention
from flare_ray.device.ops.kda import reference as kda_reference
from flare_ray.device.ops.kda import triton as kda
from flare_ray.device.ops.kda.gated import GatedRows, Gates
from flare_ray.device.ops.key_rounding.api import round_fp8
from flare_ray.device.ops.moe import reference as moe_reference
from flare_ray.device.ops.moe import triton as moe
from flare_ray.device.ops.moe.fp4 import triton as fp4
from flare_ray.device.ops.moe.fp8 import triton as fp8
from flare_ray.device.ops.moe.packed import Fp8Stack, Mxfp4Stack, Nvfp4Stack
from flare_ray.device.ops.pooled_index import reference as pools_reference
from flare_ray.device.ops.pooled_index import triton as pools
from flare_ray.device.ops.pooled_index.selection import triton as selection
from flare_ray.device.ops.rmsnorm import reference as norm_reference
from flare_ray.device.ops.rmsnorm import triton as norm
from flare_ray.device.ops.router import reference as router_reference
from flare_ray.device.ops.router import triton as router
from flare_ray.device.ops.row_gather import triton as row_gather
from flare_ray.device.ops.row_gather.api import StoredRows
from flare_ray.device.ops.short_conv import reference as conv_reference
from flare_ray.device.ops.short_conv import triton as conv
from flare_ray.device.ops.swiglu import reference as swiglu_reference
from flare_ray.device.ops.swiglu import triton as swiglu
from flare_ray.device.sampling import philox
from flare_ray.device.sampling.chain import reference_chain, reference_draw
from flare_ray.device.sampling.distribution import triton as distribution
from flare_ray.device.sampling.filters import nucleus_mask
from flare_ray.device.sampling.inverse_cdf import triton as inverse_cdf
from flare_ray.device.sampling.stream import triton as stream
from flare_ray.device.weights.formats.fp8_block import quantise_fp8_block
from flare_ray.device.weights.formats.mxfp4 import quantise_mxfp4
from flare_ray.device.weights.formats.nvfp4 import quantise_nvfp4

ATOL = 2e-5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(got: torch.Tensor, wanted: torch.Tensor, atol: float = ATOL) -> bool:
    return float((got - wanted).abs().max()) <= atol * float(wanted.abs().max().clamp(min=1.0))


def test_a_site_of_streams():
    rows, hidden = 3, 96
    projection, base = torch.randn(24, 4 * hidden), torch.randn(24)
    scale, x = torch.rand(3) + 0.5, torch.randn(rows, 4, hidden)
    factor = torch.repeat_interleave(scale, torch.tensor([4, 4, 16])) * math.sqrt(4 * hidden)
    site = streams.Site(
        projection * factor[:, None], base, floor=4e-5 * hidden, iterations=20, eps=1e-6
    )
    raw = streams_reference.projected(x, projection, norm_eps=1e-5)
    wanted = streams_reference.coefficients(raw, base, scale, iterations=20, eps=1e-6)
    mixed, *got = site.mix_in(x)
    assert all(map(close, got, wanted))
    assert close(mixed, (wanted[0][..., None] * x).sum(1))
    block = torch.randn(rows, hidden)
    out = streams_reference.mix_out(block, x, *wanted[1:])
    assert close(streams.mix_out(block, x, *got[1:]), out)


def test_a_norm_of_strided_rows():
    x, weight = torch.randn(3, 90)[:, 5:75], torch.randn(70)
    wanted = norm_reference.rmsnorm(x, weight, eps=1e-5)
    assert close(norm.rmsnorm(x, weight, eps=1e-5), wanted)


def test_an_activation_beyond_its_bounds():
    both = torch.randn(3, 2 * 70) * 4
    wanted = swiglu_reference.clamped_swiglu(*both.chunk(2, -1), limit=3.0)
    assert close(swiglu.clamped_swiglu(both, limit=3.0), wanted)


def routed(experts: int, rows: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)])
    return ids, torch.rand(rows, top_k)


def expected(x, gate_up, down, ids, weights, *, shared=0):
    shares = torch.zeros(x.shape[0], gate_up.shape[0]).scatter_(1, ids, weights)
    if shared:
        shares[:, -shared:] = 1.0
    return moe_reference.all_experts(x, gate_up, down, shares, limit=3.0)


def test_plain_experts():
    gate_up, down = torch.randn(7, 80, 72) / 8, torch.randn(7, 40, 72) / 8
    x, (ids, weights) = torch.randn(5, 72), routed(6, 5, 2)
    got = moe.PlainExperts(gate_up, down, shared=1, limit=3.0)(x, ids, weights)
    assert close(got, expected(x, gate_up, down, ids, weights, shared=1))


@pytest.mark.parametrize("few_rows", [100, 0])
def test_nvfp4_experts(few_rows):
    stack = Nvfp4Stack.empty(5, 48, 96, torch.device("cpu"))
    for e in range(5):
        parts = [quantise_nvfp4(torch.randn(*s)) for s in ((48, 96), (48, 96), (96, 48))]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.block_scale for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].block_scale
        stack.factors[e] = torch.stack([p.global_multiplier * (n + 1) for n, p in enumerate(parts)])
    values = [stack.dequantised(e) for e in range(5)]
    gate_up = torch.stack([v[0] for v in values])
    down = torch.stack([v[1].t() for v in values])
    # the interpreter has no float8
    stack.gate_up_scale, stack.down_scale = stack.gate_up_scale.float(), stack.down_scale.float()
    x, (ids, weights) = torch.randn(4, 96), routed(5, 4, 2)
    got = fp4.Fp4Experts(stack, limit=3.0, few_rows=few_rows)(x, ids, weights)
    assert close(got, expected(x, gate_up, down, ids, weights), 2e-4)


@pytest.mark.parametrize("few_rows", [100, 0])
@pytest.mark.parametrize("rounding", [None, round_fp8])
def test_mxfp4_experts(few_rows, rounding):
    stack = Mxfp4Stack.empty(3, 32, 64, torch.device("cpu"))
    for e in range(3):
        parts = [quantise_mxfp4(torch.randn(*s)) for s in ((32, 64), (32, 64), (64, 32))]
        stack.gate_up[e] = torch.cat([p.packed for p in parts[:2]])
        stack.gate_up_scale[e] = torch.cat([p.exponents for p in parts[:2]])
        stack.down[e], stack.down_scale[e] = parts[2].packed, parts[2].exponents
    values = [stack.dequantised(e) for e in range(3)]
    gate_up, down = torch.stack([v[0] for v in values]), torch.stack([v[1].t() for v in values])
    x, (ids, weights) = torch.randn(3, 64), routed(3, 3, 2)
    x = x if rounding is None else rounding(x)
    kind = fp4.Fp4Experts(stack, limit=3.0, few_rows=few_rows, rounding=rounding)
    routing = moe_reference.Routing(ids, weights)
    wanted = moe_reference.chosen_experts(x, gate_up, down, routing, limit=3.0, rounding=rounding)
    assert close(kind(x, ids, weights), wanted, 2e-4)


@pytest.mark.parametrize(("packed", "scale"), [(False, 1.0), (False, 0.0371), (True, 1.0)])
def test_rows_of_a_table(packed, scale):
    values, numbers = torch.randn(50, 160).to(torch.float16), torch.randint(0, 50, (7,))
    exponents = torch.randint(120, 130, (50, 5), dtype=torch.uint8) if packed else None
    wanted = values[numbers].float()
    wanted *= scale
    if exponents is not None:
        wanted *= (exponents[numbers].int() << 23).view(torch.float32).repeat_interleave(32, 1)
    stored = StoredRows([values], () if exponents is None else [exponents], scale)
    got = row_gather.gather(stored, numbers, dtype=torch.float32)
    assert torch.equal(got, wanted)


def test_fp8_experts():
    stack = Fp8Stack.empty(3, 128, 256, torch.device("cpu"))
    for e in range(3):
        both, low = (quantise_fp8_block(torch.randn(256, n)) for n in (256, 128))
        stack.gate_up[e], stack.gate_up_scale[e] = both.weight, both.scale_inv
        stack.down[e], stack.down_scale[e] = low.weight, low.scale_inv
    values = [stack.dequantised(e) for e in range(3)]
    gate_up = torch.stack([v[0] for v in values])
    down = torch.stack([v[1].t() for v in values])
    stack.gate_up, stack.down = stack.gate_up.float(), stack.down.float()
    x, (ids, weights) = torch.randn(4, 256), routed(3, 4, 2)
    got = fp8.Fp8Experts(stack, limit=3.0)(x, ids, weights)
    assert close(got, expected(x, gate_up, down, ids, weights))


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_routing_with_ties(scoring):
    x, weight, bias = torch.randn(4, 32), torch.randn(20, 32), torch.randn(20) * 0.1
    weight[7], bias[7] = weight[3], bias[3]
    rules = {"top_k": 6, "scale": 2.5, "scoring": scoring}
    products = router.products(x, weight)
    assert close(products, torch.nn.functional.linear(x, weight))
    assert torch.equal(products[:, 7], products[:, 3])
    got = router.choose(products, bias, **rules)
    wanted = router_reference.route(x, weight, bias, **rules)
    assert torch.equal(got[0], wanted[0]) and close(got[1], wanted[1])


def test_a_recurrent_round():
    heads, dim, width = 3, 32, 3
    slots, column = torch.tensor([3, 1]), torch.tensor([4, 0])
    rows = round_rows(slots, column, width=width, keep=3)
    window, raw, taps = torch.randn(5, 11, 70), torch.randn(6, 79)[:, :70], torch.randn(4, 70)
    kept = window.clone()
    wanted = conv_reference.short_conv(join_window(raw, rows, kept), taps)
    got = conv.round_conv(raw, window, taps, slots=slots, column=column)
    assert close(got.view_as(wanted), wanted) and torch.equal(window, kept)

    states, qkv = torch.randn(40, heads, dim, dim), torch.randn(6, 3, heads, dim)
    outer, beta = torch.randn(2, 6, heads * dim), torch.randn(6, 50)[:, 10:13]
    factor, offset, norm = torch.rand(heads * dim), torch.randn(heads * dim), torch.randn(dim)
    gates = Gates(factor, offset, -5.0, norm * math.sqrt(dim), 1e-5 * dim)
    before = states.clone()
    got = kda.gated_round(
        GatedRows(qkv, outer, beta), gates, states, read=rows.state_read, write=rows.state_write
    )
    decay = (-5 * torch.sigmoid(outer[0] * factor + offset)).view(2, width, heads, dim)
    output, after = kda_reference.delta_rule(
        qkv.view(2, width, 3, heads, dim),
        decay,
        torch.sigmoid(beta).view(2, width, heads),
        before[rows.state_read],
    )
    before.index_copy_(0, rows.state_write, after.flatten(0, 1))
    assert close(states, before)
    gate = torch.sigmoid(outer[1]).view_as(output)
    assert close(got.view_as(output), norm_reference.rmsnorm(output, norm, eps=1e-5) * gate)


def test_listed_attention():
    query, cache = torch.randn(20, 3, 32).transpose(0, 1), torch.randn(200, 32)
    index = torch.stack([torch.randperm(200)[:150] for _ in range(3)])
    index[0, 100:], index[1], index[2, ::3] = -1, -1, -1
    got = attention.indexed_attention(query, cache, index, scale=0.2)
    assert close(got, attention_reference.indexed_attention(query, cache, index, scale=0.2))


def test_pool_scores_and_selection(monkeypatch):
    monkeypatch.setattr(selection, "_CHUNK", 64)
    query, keys, weights = torch.randn(2, 3, 5, 16), torch.randn(2, 150, 16), torch.randn(2, 3, 5)
    scores = pools_reference.pool_scores(query, keys, weights)
    assert close(pools.pool_scores(query, keys, weights), scores)
    scores[0, 0, ::2], scores[1, 1], scores[0, 1, :40], scores[0, 1, 40:] = 0, -0.5, -0.0, 0.0
    visible = torch.tensor([[150, 140, 3], [0, 77, 20]])
    for count in (1, 20, 200):
        got = selection.best_pools(scores, visible, count=count)
        wanted = pools_reference.best_pools(scores, visible, count=count)
        assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)


def test_sampling_law(monkeypatch):
    for module in (distribution, inverse_cdf):
        monkeypatch.setattr(module, "CHUNK", 1024)
    keys = torch.tensor([16390493, 2871038, 12118387, -5, 2**62 + 77])
    offsets = torch.tensor([0, 2, 2, 13, 2**35 + 1])
    assert torch.equal(stream.uniforms(keys, offsets, 7), philox.uniforms(keys, offsets, 7))

    lanes, depth, size = 4, 3, 2600
    logits, heat = torch.randn(lanes, depth + 1, size) * 3, torch.rand(lanes) + 0.5
    logits[1, 0, 5:60] = logits[1, 0].max()
    top_p = torch.tensor([0.95, 0.5, 1.0, 0.1])
    softmax = torch.softmax(logits / heat.view(-1, 1, 1), -1)
    p = torch.where(nucleus_mask(softmax, top_p.view(-1, 1)), softmax, 0.0)
    p /= p.sum(-1, keepdim=True)
    got = distribution.probabilities(logits, heat, top_p)
    assert close(got, p) and torch.equal(got > 0, p > 0)

    q = torch.softmax(torch.randn(lanes, depth, size) * 3, -1)
    q[:2] = p[:2, :depth]
    drafts = reference_draw(q.flatten(0, 1), torch.rand(lanes * depth)).view(lanes, depth)
    lengths = torch.tensor([3, 2, 0, 3])
    for uniforms in (torch.rand(lanes, depth + 2), torch.ones(lanes, depth + 2)):
        chain = (p, q, drafts, lengths, uniforms)
        got, wanted = inverse_cdf.verify_chain(*chain), reference_chain(*chain)
        assert torch.equal(got.accepted, wanted.accepted)
        assert torch.equal(got.token, wanted.token)

"""Compiled CPU operators against the torch forms that CUDA runs, and those against the same."""

import pytest
import torch

from flare_ray.device.ops.hyper_connection.api import (
    HyperConnection,
    SinkhornShape,
    mean_stream,
)
from flare_ray.device.ops.indexed_attention import numba as attention
from flare_ray.device.ops.indexed_attention import reference as plain_attention
from flare_ray.device.ops.kda import api as kda
from flare_ray.device.ops.kda.api import DeltaRows, DeltaRule, SavedStates
from flare_ray.device.ops.layer_norm.api import layer_norm
from flare_ray.device.ops.linear import numba as linear
from flare_ray.device.ops.linear.api import Halves, Linear
from flare_ray.device.ops.moe import api as moe
from flare_ray.device.ops.moe.api import Experts, ExpertWeights
from flare_ray.device.ops.numba import kernel_cache
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.ops.router import numba as router
from flare_ray.device.ops.router import reference as plain_router
from flare_ray.device.sampling import numba as filters
from flare_ray.device.sampling.chain import draw, reference_draw
from flare_ray.device.sampling.filters import nucleus_mask
from flare_ray.errors import ContractViolation

TOLERANCE = 2e-5


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def bfloat16_values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize(("columns", "depth"), [(1, 5), (7, 16), (24, 33), (64, 128)])
@pytest.mark.parametrize("exact", [True, False])
def test_few_row_product_equals_the_plain_one(rows, columns, depth, exact):
    weight = bfloat16_values(columns, depth) if exact else torch.randn(columns, depth)
    stored = linear.stored(weight)
    assert stored.dtype == (torch.bfloat16 if exact else torch.float32)
    wide = torch.randn(rows, depth + 3)
    assert close(linear.multiply(wide[:, 1:-2], stored, columns), wide[:, 1:-2] @ weight.t())


@pytest.mark.parametrize("rows", [1, 6, 9])
def test_halves_meet_their_own_matrix(rows):
    weights, x = bfloat16_values(2, 16, 24), torch.randn(rows, 40)[:, 4:36]
    wanted = torch.stack([x[:, :16] @ weights[0], x[:, 16:] @ weights[1]])
    assert close(Halves(weights)(x), wanted)


@pytest.mark.parametrize("x", [torch.ones(2, 39), torch.ones(2, 40, dtype=torch.float64)])
def test_rows_of_another_size_or_type_never_reach_a_kernel(x):
    with pytest.raises(ContractViolation, match="rows of"):
        Linear(bfloat16_values(24, 40))(x)


@pytest.mark.parametrize("columns", [slice(0, 24), slice(5, 29)])
def test_norm_of_a_view_equals_the_torch_form(columns):
    op, x = RmsNorm(torch.randn(24), eps=1e-5), torch.randn(6, 40)[:, columns]
    compiled = op(x)
    op._compiled = None
    assert close(compiled, op(x))
    assert op(x[:0]).shape == (0, 24)


def test_layer_norm_of_a_view_equals_the_torch_form():
    x, weight, bias = torch.randn(6, 40), torch.randn(24), torch.randn(24)
    wanted = torch.nn.functional.layer_norm(x[:, 5:29], (24,), weight, bias, 1e-6)
    assert close(layer_norm(x[:, 5:29], weight, bias, eps=1e-6), wanted)
    assert layer_norm(x[:0, :24], weight, bias, eps=1e-6).shape == (0, 24)


def test_mean_of_streams_equals_torchs():
    streams = torch.randn(5, 4, 16)
    assert close(mean_stream(streams), streams.mean(1))


@pytest.mark.parametrize("size", [7, 64, 65, 8192])
@pytest.mark.parametrize("kept", [1.0, 0.02])
def test_draw_equals_the_torch_form_token_for_token(size, kept):
    weights = torch.rand(40, size) * (torch.rand(40, size) < kept)
    uniforms = torch.rand(40)
    uniforms[0], uniforms[1], weights[2] = 1.0, 1e-9, 0.0
    assert torch.equal(draw(weights, uniforms), reference_draw(weights, uniforms))


@pytest.mark.parametrize(("streams", "rows"), [(2, 5), (3, 5), (4, 1), (4, 37)])
def test_stream_mixing_equals_the_torch_form_and_no_row_feels_its_neighbours(streams, rows):
    outputs = (2 + streams) * streams
    shape = SinkhornShape(iterations=20, eps=1e-6, norm_eps=1e-5)
    site = HyperConnection(
        torch.randn(outputs, streams * 16) * 0.1,
        torch.randn(outputs),
        torch.rand(3),
        streams=streams,
        shape=shape,
    )
    state = torch.randn(rows, streams, 16)
    x, mix = site.mix_in(state)
    alone, its_mix = site.mix_in(state[-1:])
    assert torch.equal(alone, x[-1:]) and torch.equal(its_mix.mix, mix.mix[-1:])
    site._site = None
    wanted_x, wanted = site.mix_in(state)
    assert close(x, wanted_x) and close(mix.post, wanted.post) and close(mix.mix, wanted.mix)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("dim", [16, 128, 130])
def test_rounds_states_and_outputs_equal_the_torch_form(width, dim, monkeypatch):
    rule = DeltaRule(max_width=8, lower_bound=-5.0)
    rows = DeltaRows(
        torch.randn(2, width, 3, 2, dim),
        -5 * torch.rand(2, width, 2, dim),
        torch.rand(2, width, 2),
    )
    states = torch.randn(20, 2, dim, dim)
    # The second lane starts from a row that it overwrites.
    write = torch.cat((torch.arange(width), 10 + torch.arange(width)))
    results = []
    for compiled in (True, False):
        monkeypatch.setattr(kda, "_compiles", lambda saved, compiled=compiled: compiled)
        saved = SavedStates(states.clone(), torch.tensor([9, 10]), write)
        results.append((rule.round(rows, saved), saved.rows))
    assert close(results[0][0], results[1][0]) and close(results[0][1], results[1][1])


@pytest.mark.parametrize("cut", [1, 7, 32, 40])
def test_prefill_does_not_depend_on_its_chunks_in_any_bit_and_equals_the_torch_form(
    cut, monkeypatch
):
    rule = DeltaRule(max_width=8, lower_bound=-5.0)
    qkv, decay = torch.randn(1, 41, 3, 2, 16), -5 * torch.rand(1, 41, 2, 16)
    beta, states, row = torch.rand(1, 41, 2), torch.randn(3, 2, 16, 16), torch.tensor([1])

    def run(states, *parts):
        saved = SavedStates(states.clone(), row, row)
        outputs = [
            rule.prefill(
                DeltaRows(qkv[:, part], decay[:, part], beta[:, part]),
                saved,
                torch.ones(1, part.stop - part.start, dtype=torch.bool),
            )
            for part in parts
        ]
        return torch.cat(outputs, 1), saved.rows

    whole = run(states, slice(0, 41))
    pieces = run(states, slice(0, cut), slice(cut, 41))
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])
    monkeypatch.setattr(kda, "_compiles", lambda saved: False)
    plain = run(states, slice(0, 41))
    assert close(whole[0], plain[0]) and close(whole[1], plain[1])


def test_hidden_and_unlisted_rows_of_attention_are_never_read():
    query, cache = torch.randn(3, 4, 64), torch.full((40, 64), float("nan"))
    cache[:20] = torch.randn(20, 64)
    index = torch.randint(0, 20, (3, 30))
    index[:, 25:] = -1
    index[1] = -1
    got = attention.indexed_attention(query, cache, index, scale=0.3)
    assert close(got, plain_attention.indexed_attention(query, cache, index, scale=0.3))
    assert not got[1].any()


@pytest.mark.parametrize("width", [1, 3, 35])
def test_causal_attention_equals_the_torch_form_and_no_row_feels_its_neighbours(width):
    query, cache = torch.randn(2, width, 8, 128), torch.full((70, 128), float("nan"))
    cache[:64] = torch.randn(64, 128)
    read = torch.randint(0, 64, (2, 60))
    bias = torch.zeros(2, width, 60).masked_fill_(torch.rand(2, width, 60) < 0.4, float("-inf"))
    bias[:, :, 0], bias[:, :, 50:] = 0.0, float("-inf")
    taken = cache.index_select(0, read.view(-1)).view(2, 60, 128)
    wanted = plain_attention.causal_attention(query, taken, bias, scale=0.1)
    read[:, 50:] = 69
    got = attention.causal_attention(query, cache, read.view(-1), bias, scale=0.1)
    assert close(got, wanted)
    parts = [
        attention.causal_attention(query[:, [t]], cache, read.view(-1), bias[:, [t]], scale=0.1)
        for t in range(width)
    ]
    assert torch.equal(torch.cat(parts, 1), got)


def test_a_row_that_sees_nothing_attends_to_nothing():
    query, cache, read = torch.randn(1, 2, 4, 64), torch.randn(9, 64), torch.arange(9)
    bias = torch.full((1, 2, 9), float("-inf"))
    assert not attention.causal_attention(query, cache, read, bias, scale=0.1).any()
    bias[0, 1, 3] = 0.0
    got = attention.causal_attention(query, cache, read, bias, scale=0.1)
    assert not got[0, 0].any() and close(got[0, 1], cache[3].expand(4, 64))


@pytest.mark.parametrize(("experts", "shared"), [(8, 1), (8, 0), (24, 2)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_chosen_experts_equal_the_torch_form_and_no_row_feels_its_neighbours(
    monkeypatch, experts, shared, exact, rows
):
    make = bfloat16_values if exact else torch.randn
    weights = ExpertWeights(make(experts + shared, 24, 72) / 4, make(experts + shared, 12, 72) / 4)
    op = Experts(weights, shared=shared, top_k=2, limit=1.5)
    monkeypatch.setattr(moe, "_compiles", lambda weight: False)
    plain = Experts(weights, shared=shared, top_k=2, limit=1.5)
    x, shares = torch.randn(rows, 72), torch.rand(rows, 2)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(rows)])
    compiled = op(x, chosen, shares)
    assert torch.allclose(compiled, plain(x, chosen, shares), rtol=1e-4, atol=1e-4)
    alone = [op(x[r : r + 1], chosen[r : r + 1], shares[r : r + 1]) for r in range(rows)]
    assert torch.equal(compiled, torch.cat(alone))


def test_equal_scores_route_to_the_lower_expert():
    x, weight = torch.randn(4, 16), torch.randn(6, 16)
    weight[3] = weight[1]
    bias = torch.tensor([-9.0, 1.0, -9.0, 1.0, -9.0, 1.0])
    got = router.route(x, weight, bias, top_k=2, scale=2.5)
    wanted = plain_router.route(x, weight, bias, top_k=2, scale=2.5)
    assert torch.equal(got[0], wanted[0]) and close(got[1], wanted[1])
    assert ((got[0] == 3).any(1) <= (got[0] == 1).any(1)).all()


@pytest.mark.parametrize("vocabulary", [7, 300, 8192])
@pytest.mark.parametrize("ties", [True, False])
def test_filtered_rows_equal_a_sort_in_double_precision(vocabulary, ties):
    logits = torch.randn(2, 3, vocabulary) * 2
    probs = torch.softmax((logits * 2).round() / 2 if ties else logits, -1)
    top_p, min_p = torch.tensor([0.9, 1.0]), torch.tensor([0.0, 0.05])
    got = filters.filter_rows(probs.clone(), top_p, min_p)
    wanted = torch.where(nucleus_mask(probs, top_p.view(-1, 1)), probs, 0.0).double()
    order = torch.sort(probs[0].double(), dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    # float32 probabilities do not sum to 1: the mass is a share of their sum.
    kept = before < 0.9 * probs[0].double().sum(-1, keepdim=True)
    wanted[0] = torch.zeros_like(wanted[0]).scatter_(-1, order.indices, order.values * kept)
    floor = min_p.view(-1, 1, 1) * wanted.amax(-1, keepdim=True)
    wanted = torch.where(wanted >= floor, wanted, 0.0)
    wanted /= wanted.sum(-1, keepdim=True)
    # At the boundary itself one token may fall to either side of 0.9 in the last bit of a float.
    differs = (got > 0) != (wanted > 0)
    assert differs.sum() <= 1
    same = ~differs.any(-1)
    assert torch.allclose(got.double()[same], wanted[same], rtol=TOLERANCE, atol=1e-9)


def test_machine_code_is_kept_apart_for_every_state_of_the_sources(tmp_path):
    """A kernel holds what it inlined from other files, which numba's own stamps do not see."""
    (tmp_path / "sub").mkdir()
    kernels, helper = tmp_path / "numba.py", tmp_path / "sub" / "helper.py"
    kernels.write_text("import numba\n")
    helper.write_text("import llvmlite\n")
    (tmp_path / "other.py").write_text("import torch\n")
    first = kernel_cache.__wrapped__(tmp_path)
    first.mkdir(parents=True)
    assert kernel_cache.__wrapped__(tmp_path) == first
    (tmp_path / "other.py").write_text("import torch, json\n")
    assert kernel_cache.__wrapped__(tmp_path) == first
    helper.write_text("import llvmlite  # another form\n")
    assert kernel_cache.__wrapped__(tmp_path) != first
    assert not first.exists()

"""Rotation, rounding of keys, attention with a sink, candidate blocks, late stream mixing and
square-root routing against closed forms or brute force."""

from __future__ import annotations

import math

import pytest
import torch

from flare_ray.device.ops.engram.api import gated_write
from flare_ray.device.ops.hyper_connection.api import HyperConnection, SinkhornShape, collapse
from flare_ray.device.ops.key_rounding.api import (
    power_of_two_above,
    round_fp4,
    round_fp4_e4m3,
    round_fp8,
)
from flare_ray.device.ops.pooled_index.api import candidate_blocks
from flare_ray.device.ops.rotary_pairs.api import Yarn, frequencies, phases, rotate
from flare_ray.device.ops.router.api import route
from flare_ray.device.ops.sink_attention import reference as sink_reference
from flare_ray.device.ops.sink_attention.api import Listed, sink_attention
from flare_ray.errors import ContractViolation
from tests.support.deepseek_oracle import E2M1, E4M3, rounded

ATOL = 1e-5


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    rates = frequencies(8, 10000.0)
    x, y = noise(1, 32, seed=1), noise(1, 32, seed=2)

    def product(p: int, q: int) -> float:
        turned = [rotate(v, phases(torch.tensor([at]), rates)) for v, at in ((x, p), (y, q))]
        return float((turned[0] * turned[1]).sum())

    assert product(5, 3) == pytest.approx(product(105, 103), abs=1e-3)
    assert abs(product(5, 3) - product(5, 4)) > 1e-2
    turned = rotate(x, phases(torch.tensor([77]), rates))
    assert torch.equal(turned[:, :24], x[:, :24])
    assert float(turned.norm()) == pytest.approx(float(x.norm()), rel=1e-5)


def test_rotation_back_undoes_it_for_every_head():
    phase = phases(torch.arange(5), frequencies(8, 160000.0))
    x = noise(5, 3, 16)
    assert torch.allclose(rotate(rotate(x, phase), phase, back=True), x, atol=ATOL)


def test_stretched_frequencies_keep_fast_turns_and_divide_slow_ones():
    yarn = Yarn(factor=16, beta_fast=32, beta_slow=1, original_tokens=65536)
    plain, stretched = frequencies(64, 160000.0), frequencies(64, 160000.0, yarn)
    assert torch.equal(stretched[:15], plain[:15])
    assert torch.allclose(stretched[25:], plain[25:] / 16)
    assert (stretched[16:25] < plain[16:25]).all()


@pytest.mark.parametrize(
    ("ours", "group", "grid", "floor", "e4m3"),
    [
        (round_fp8, 32, E4M3, 1e-4, False),
        (round_fp4, 32, E2M1, 6 * 2.0**-126, False),
        (round_fp4_e4m3, 16, E2M1, 6 * 2.0**-9, True),
    ],
)
@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 300.0])
def test_roundings_equal_a_search_of_the_grid(ours, group, grid, floor, e4m3, scale):
    x = noise(40, 64, seed=3) * scale
    x[0] = 0.0
    x[1, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) * scale
    assert torch.equal(ours(x), rounded(x, group, grid, floor, e4m3_scale=e4m3))


def test_rounding_twice_changes_nothing_and_bfloat16_holds_it():
    x = noise(64, 64, seed=4)
    for ours in (round_fp8, round_fp4):
        once = ours(x)
        assert torch.equal(ours(once), once)
        assert torch.equal(once.to(torch.bfloat16).to(torch.float32), once)


def test_power_of_two_above_is_exact_at_powers():
    x = torch.tensor([1.0, 1.0000001, 0.5, 3.0, 4.0, 2.0**-100])
    assert power_of_two_above(x).tolist() == [1.0, 2.0, 0.5, 4.0, 4.0, 2.0**-100]


def test_a_row_that_is_no_whole_groups_is_refused():
    with pytest.raises(ContractViolation, match="groups of 32"):
        round_fp8(noise(2, 40))


def listed(seed: int, rows: int, pool: int, count: int, dim: int) -> Listed:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-2, pool - 3, (rows, count), generator=generator).clamp(min=-1)
    keys = torch.randn((pool, dim), generator=generator)
    keys[pool - 3 :] = float("nan")  # nobody lists them
    return Listed(keys, index)


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
@pytest.mark.parametrize("block", [None, 64])
def test_attention_equals_one_softmax_over_both_lists_and_the_sink(monkeypatch, block, heads):
    """Compiled, and in torch in blocks."""
    attend = sink_attention if block is None else sink_reference.sink_attention
    if block is not None:
        monkeypatch.setattr(sink_reference, "BLOCK_ELEMENTS", block)
    rows, dim = 7, 16
    query, sink = noise(rows, heads, dim), noise(heads, seed=9)
    lists = (listed(1, rows, 20, 6, dim), listed(2, rows, 30, 4, dim))
    got = attend(query, lists, sink, scale=0.3)
    for row in range(rows):
        keys = torch.cat([part.pool[part.index[row][part.index[row] >= 0]] for part in lists])
        for head in range(heads):
            weights = torch.exp(keys @ query[row, head] * 0.3)
            wanted = (weights[:, None] * keys).sum(0) / (weights.sum() + sink[head].exp())
            assert torch.allclose(got[row, head], wanted, atol=ATOL)


def test_a_row_that_sees_nothing_attends_to_nothing():
    hidden = Listed(torch.full((3, 8), float("nan")), torch.full((2, 4), -1))
    got = sink_attention(noise(2, 2, 8), (hidden,), torch.zeros(2), scale=1.0)
    assert torch.equal(got, torch.zeros(2, 2, 8))


@pytest.mark.parametrize("seed", range(20))
def test_candidate_blocks_equal_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    pools, size, count = 22, 4, 3
    # few distinct scores, so that ties are common; what is not visible must not matter
    scores = torch.randint(0, 4, (5, pools), generator=generator).float()
    visible = torch.randint(0, pools + 1, (5,), generator=generator)
    scores[torch.arange(pools) >= visible[:, None]] = float("nan")
    got = candidate_blocks(scores, visible, count=count, size=size)
    for row, seen in enumerate(visible.tolist()):
        best = {
            b: max(scores[row, b * size : min((b + 1) * size, seen)].tolist())
            for b in range(-(-seen // size))
        }
        if seen:
            best[(seen - 1) // size] = math.inf
        kept = set(sorted(best, key=lambda b: (-best[b], b))[:count])
        assert got[row].tolist() == [pool // size in kept for pool in range(pools)]


def site(streams: int, hidden: int) -> HyperConnection:
    rows = (2 + streams) * streams
    return HyperConnection(
        noise(rows, streams * hidden, seed=5) / math.sqrt(streams * hidden),
        noise(rows, seed=6),
        1 + 0.2 * noise(3, seed=7),
        streams=streams,
        shape=SinkhornShape(20, 1e-6, 1e-20),
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_late_mixing_takes_the_coefficients_of_the_site_before(compiled):
    connection = site(4, 24)
    if not compiled:
        connection._site = None
    streams, before = noise(6, 4, 24), noise(6, 4, seed=8)
    x, handed, late = connection.mix_late(streams, before)
    own, early = connection.mix_in(streams)
    assert torch.allclose(x, torch.einsum("ti,tid->td", before, streams), atol=ATOL)
    assert torch.allclose(collapse(streams, handed), own, atol=ATOL)
    assert torch.allclose(late.post, early.post, atol=1e-6)
    assert torch.allclose(late.mix, early.mix, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 50])
def test_square_root_routing_equals_its_definition(rows):
    x, weight, bias = noise(rows, 16) * 4, noise(8, 16, seed=1), 0.3 * noise(8, seed=2)
    experts, weights = route(x, weight, bias, top_k=3, scale=1.5, scoring="sqrt_softplus")
    scores = torch.log1p(torch.exp((x @ weight.t()).double())).sqrt()
    wanted = (scores + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(experts, wanted)
    chosen = scores.gather(1, wanted)
    assert torch.allclose(weights.double(), chosen / chosen.sum(1, keepdim=True) * 1.5, atol=ATOL)


def test_gated_write_adds_the_value_by_agreement():
    streams, hidden = 3, 16
    h, joint, factor = (
        noise(5, streams, hidden),
        noise(5, 4 * hidden, seed=1),
        noise(streams, hidden, seed=2),
    )
    got = gated_write(h, joint, factor, eps=1e-20)
    key, value = joint.view(5, 4, hidden).split([3, 1], dim=1)
    d = (h * factor * key).sum(-1) / (
        h.square().mean(-1).sqrt() * key.square().mean(-1).sqrt() * math.sqrt(hidden)
    )
    gate = torch.sigmoid(d.sign() * d.abs().clamp(min=1e-6).sqrt())
    assert torch.allclose(got, h + gate[..., None] * value, atol=ATOL)

"""The sampling law on CUDA against the CPU's (contract: S1, S5, S9)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.sampling import philox
from flare_ray.device.sampling.chain import draw, reference_chain, reference_draw, verify_chain
from flare_ray.device.sampling.filters import FilterParams, draft_probs, target_probs
from tests.gpu.kernels import replayed

pytestmark = pytest.mark.gpu

V = 154_880
ONES = ((16390493, 0), (2871038, 2), (12118387, 2))
"""(key, offset) whose uniform is exactly 1."""
CDF_EPS = 1e-5
"""Distance from a boundary of the cumulative distribution within which a neighbour may be drawn."""


def params(batch: int, *, top_p: float, min_p: float = 0.0, top_k: int = 0) -> FilterParams:
    made = {"device": "cuda"}
    return FilterParams(
        temperature=torch.linspace(0.7, 1.3, batch, **made),
        top_k=torch.full((batch,), top_k, **made),
        top_p=torch.full((batch,), top_p, **made),
        min_p=torch.full((batch,), min_p, **made),
        max_top_k=top_k,
        every_lane_greedy=False,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )


def on_cpu(given: FilterParams) -> FilterParams:
    moved = {
        name: getattr(given, name).cpu() for name in ("temperature", "top_k", "top_p", "min_p")
    }
    rest = {
        name: getattr(given, name)
        for name in ("max_top_k", "every_lane_greedy", "any_top_p", "any_min_p")
    }
    return FilterParams(**moved, **rest)


def test_stream_equals_the_cpu_law_and_reaches_one():
    keys = torch.randint(-(2**62), 2**62, (64,))
    offsets = torch.randint(0, 2**40, (64,))
    keys[:3] = torch.tensor([key for key, _ in ONES])
    offsets[:3] = torch.tensor([offset for _, offset in ONES])
    wanted = philox.uniforms(keys, offsets, 9)
    assert torch.equal(philox.uniforms(keys.cuda(), offsets.cuda(), 9).cpu(), wanted)
    assert bool((wanted[:3, 0] == 1.0).all())


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3])
@pytest.mark.parametrize("spread", [1.0, 4.0, 12.0])
def test_distributions_equal_the_cpus(top_p, spread):
    torch.manual_seed(int(spread))
    logits = torch.randn((2, 3, V), device="cuda") * spread
    logits[1, 0, 1000:3000] = logits[1, 0].max()
    logits[0, 2, 5:] = float("-inf")
    given = params(2, top_p=top_p)
    got = target_probs(logits, given)
    wanted = target_probs(logits.cpu(), on_cpu(given))
    assert float((got.cpu() - wanted).abs().sum(-1).max()) <= 2e-4
    moved = ((got.cpu() > 0) != (wanted > 0)).float() * torch.maximum(got.cpu(), wanted)
    assert float(moved.sum(-1).max()) <= 3e-5  # tokens at the boundary, by mass
    assert float((got.sum(-1) - 1).abs().max()) <= 1e-5
    assert torch.equal(target_probs(logits.clone(), given), got)
    assert torch.equal(replayed(lambda: target_probs(logits, given)), got)


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn((4, 2, V), device="cuda") * 4
    given = params(4, top_p=0.9)
    alone = params(4, top_p=0.9)
    alone.temperature, alone.top_p = given.temperature[2:3], given.top_p[2:3]
    assert torch.equal(target_probs(logits, given)[2:3], target_probs(logits[2:3], alone))
    assert torch.equal(draft_probs(logits[:, 0], given)[2:3], draft_probs(logits[2:3, 0], alone))


def test_min_p_and_top_k_equal_the_cpus():
    logits = torch.randn((2, 2, V), device="cuda") * 4
    given = params(2, top_p=0.95, min_p=0.02, top_k=20)
    wanted = target_probs(logits.cpu(), on_cpu(given))
    assert float((target_probs(logits, given).cpu() - wanted).abs().max()) <= 1e-5


def chains(lanes: int, depth: int, vocabulary: int):
    p = torch.softmax(torch.randn((lanes, depth + 1, vocabulary), device="cuda") * 3, -1)
    near = p[:, :depth].log() + torch.randn((lanes, depth, vocabulary), device="cuda") * 0.3
    q = torch.softmax(near, -1)
    flat = reference_draw(q.flatten(0, 1), torch.rand(lanes * depth, device="cuda"))
    lengths = torch.arange(lanes, device="cuda") % (depth + 1)
    return p, q, flat.view(lanes, depth), lengths


@pytest.mark.parametrize("depth", [1, 5, 7])
def test_chain_decides_as_the_reference(depth):
    torch.manual_seed(depth)
    p, q, drafts, lengths = chains(24, depth, 9000)
    for _ in range(20):
        uniforms = torch.rand((24, depth + 2), device="cuda")
        got = verify_chain(p, q, drafts, lengths, uniforms)
        wanted = reference_chain(*(x.cpu() for x in (p, q, drafts, lengths, uniforms)))
        assert torch.equal(got.accepted.cpu(), wanted.accepted)
        for lane in torch.nonzero(got.token.cpu() != wanted.token).flatten().tolist():
            row, ended = int(wanted.accepted[lane]), int(lengths[lane])
            weight = p[lane, row].double()
            if row < ended:
                weight = (weight - q[lane, row].double()).clamp(min=0)
            reached = (weight.cumsum(0) / weight.sum()).cpu()
            low, high = sorted((int(got.token[lane]), int(wanted.token[lane])))
            assert float(reached[high - 1] - reached[low]) <= CDF_EPS


def test_a_uniform_of_one_emits_the_draft_where_nothing_is_left():
    for key, offset in ONES:
        uniforms = philox.uniforms(
            torch.tensor([key], device="cuda"), torch.tensor([offset], device="cuda"), 3
        )
        mass = torch.zeros((1, 2, V), device="cuda")
        mass[..., 77_777] = 1.0
        drafts = torch.tensor([[77_777]], device="cuda")
        result = verify_chain(mass, mass[:, :1], drafts, torch.tensor([1], device="cuda"), uniforms)
        assert (int(result.accepted), int(result.token)) == (0, 77_777)


def test_draws_follow_the_weights_at_both_ends():
    weights = torch.zeros((3, V), device="cuda")
    weights[:, 4095:4097] = 0.25
    weights[:, V - 1] = 0.5
    uniforms = torch.tensor([1e-9, 0.49999, 1.0], device="cuda")
    assert draw(weights, uniforms).tolist() == [4095, 4096, V - 1]


def test_draws_from_a_strided_row_are_the_rows_own():
    q = torch.softmax(torch.randn((3, 4, 5000), device="cuda"), -1)
    uniforms = torch.rand(3, device="cuda")
    assert torch.equal(draw(q[:, 2], uniforms), draw(q[:, 2].clone(), uniforms))
    uniforms = torch.rand((3, 6), device="cuda")
    p = torch.softmax(torch.randn((3, 3, 5000), device="cuda"), -1)
    drafts = torch.randint(0, 5000, (3, 4), device="cuda")
    lengths = torch.tensor([2, 1, 0], device="cuda")
    got = verify_chain(p, q[:, :2], drafts[:, :2], lengths, uniforms[:, :4])
    whole = verify_chain(
        p, q[:, :2].clone(), drafts[:, :2].clone(), lengths, uniforms[:, :4].clone()
    )
    assert torch.equal(got.token, whole.token)

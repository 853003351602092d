"""Filters against brute force: exact sets, ties to the lowest id, order (contract: S2)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_ray.device.sampling.filters import (
    FilterParams,
    draft_probs,
    nucleus_mask,
    one_hot_max,
    target_probs,
    top_k_mask,
)

FILTER_TOLERANCE = 2e-6  # float32 rounding of one softmax and two renormalisations at 64 tokens

NUCLEUS_MASS_TOLERANCE = 1e-9  # of sums in float64


def make_params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, lanes=1):
    return FilterParams(
        temperature=torch.full((lanes,), float(temperature)),
        top_k=torch.full((lanes,), top_k, dtype=torch.int64),
        top_p=torch.full((lanes,), float(top_p)),
        min_p=torch.full((lanes,), float(min_p)),
        max_top_k=top_k,
        every_lane_greedy=top_k == 1,
        any_top_p=top_p < 1.0,
        any_min_p=min_p > 0.0,
    )


def brute_force(logits, temperature, top_k, top_p, min_p):
    """The filters as a loop over a sorted list, in float64."""
    peak = max(logits)
    weight = [math.exp((x - peak) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    keep = order[:top_k] if top_k else order
    total = sum(weight[i] for i in keep)
    if top_p < 1.0:
        nucleus, mass = [], 0.0
        for i in keep:
            if mass >= top_p * total - 1e-12:
                break
            nucleus.append(i)
            mass += weight[i]
        keep = nucleus
    keep = [i for i in keep if weight[i] >= min_p * weight[keep[0]]]
    total = sum(weight[i] for i in keep)
    return [weight[i] / total if i in set(keep) else 0.0 for i in range(len(logits))]


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=40),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.013, 0.37, 0.61, 0.953, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.23]),
)
def test_target_probs_equal_brute_force_with_ties(logits, temperature, top_k, top_p, min_p):
    top_k = min(top_k, len(logits))
    expected = brute_force([float(x) for x in logits], temperature, top_k, top_p, min_p)
    got = target_probs(
        torch.tensor([[logits]], dtype=torch.float32),
        make_params(temperature, top_k, top_p, min_p),
    )[0, 0]
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float32), atol=FILTER_TOLERANCE)


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_ties():
    logits = torch.tensor([[2.0, 5.0, 2.0, 2.0, 5.0, 1.0]])
    kept = top_k_mask(logits, torch.tensor([3]), 3)
    assert kept[0].tolist() == [True, True, False, False, True, False]


def test_nucleus_takes_equal_probabilities_in_id_order():
    probs = torch.full((1, 8), 0.125)
    assert nucleus_mask(probs, torch.tensor([0.3])).sum() == 3
    assert nucleus_mask(probs, torch.tensor([0.3]))[0, :3].all()


@pytest.mark.parametrize("vocabulary", [64, 8192, 154880])
def test_nucleus_equals_a_stable_sort_on_random_rows(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(4 * torch.randn(3, vocabulary, generator=generator), -1)
    top_p = torch.tensor([0.5, 0.9, 0.99])
    order = torch.sort(probs.double(), dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    # Of the row's sum: a softmax in float32 over so many tokens is off by up to 4e-5, by machine.
    goal = top_p.double().view(-1, 1) * order.values.sum(-1, keepdim=True)
    expected = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order.indices, before < goal)
    got = nucleus_mask(probs, top_p)
    # only tokens at the boundary may differ, by as much mass as float32 sums are off
    astray = torch.where(got != expected, probs, 0.0)
    smallest_kept = torch.where(got, probs, 2.0).amin(-1)
    assert (astray.sum(-1) <= NUCLEUS_MASS_TOLERANCE + smallest_kept).all()
    assert (torch.where(got, 0.0, probs).amax(-1) <= smallest_kept).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 1e-3])
def test_tiny_temperature_gives_the_argmax_without_nan(temperature):
    logits = torch.tensor([[[3.0, 9.0, -2.0, 8.999]]])
    got = target_probs(logits, make_params(temperature))
    assert got.argmax(-1).item() == 1
    assert torch.isfinite(got).all()


def test_greedy_lane_beside_a_sampled_lane_is_one_hot_at_the_lowest_id():
    params = make_params(lanes=2)
    params.top_k = torch.tensor([1, 0])
    params.max_top_k = 1
    logits = torch.tensor([[[1.0, 4.0, 4.0]], [[1.0, 4.0, 4.0]]])
    got = target_probs(logits, params)
    assert got[0, 0].tolist() == [0.0, 1.0, 0.0]
    assert got[1, 0, 1] == got[1, 0, 2] > 0
    assert draft_probs(logits[:, 0], params)[0].tolist() == [0.0, 1.0, 0.0]


def test_masked_tokens_never_gain_probability():
    logits = torch.tensor([[[float("-inf"), 1.0, float("-inf"), 0.5]]])
    for params in (make_params(top_k=3), make_params(top_p=0.9), make_params(min_p=0.1)):
        got = target_probs(logits, params)[0, 0]
        assert got[0] == got[2] == 0.0
        assert torch.isclose(got.sum(), torch.tensor(1.0))


def test_one_hot_max_takes_the_first_of_equal_maxima():
    assert one_hot_max(torch.tensor([[0.0, 7.0, 7.0]]))[0].tolist() == [0.0, 1.0, 0.0]

"""Pooling, scores, selection with ties, and attention over what was selected: by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flare_ray.device.ops.indexed_attention import reference as attention_reference
from flare_ray.device.ops.indexed_attention.api import causal_attention, indexed_attention
from flare_ray.device.ops.pooled_index.api import (
    best_pools,
    pool_keys,
    pool_scores,
    selected_tokens,
)
from flare_ray.device.ops.pooled_index.numba import choose
from flare_ray.errors import ContractViolation

ATOL = 2e-6
"""Float32 results of order one, measured 5e-7."""


pytestmark = pytest.mark.usefixtures("inference")


def brute_force(scores: list[float], visible: int, count: int) -> list[int]:
    """The best by falling score, then by rising number; in order of number."""
    order = sorted(sorted(range(visible), key=lambda pool: (-scores[pool], pool))[:count])
    return order + [-1] * (min(count, len(scores)) - len(order))


@pytest.mark.parametrize("distinct", [1, 2, 5, 1000])
@pytest.mark.parametrize("pools", [3, 40, 300])
def test_best_pools_break_ties_to_the_lowest_number(distinct, pools):
    scores = torch.randint(0, distinct, (7, pools)).float() - 1.0
    visible = torch.tensor([0, 1, 2, pools // 2, pools - 1, pools, pools])
    got = best_pools(scores, visible, count=24)
    for row, seen, chosen in zip(scores.tolist(), visible.tolist(), got.tolist(), strict=True):
        assert chosen == brute_force(row, seen, 24)


def test_best_pools_do_not_depend_on_how_many_columns_are_in_view():
    scores = torch.zeros(1, 256)
    scores[0, 5] = 1.0
    visible = torch.tensor([30])
    chosen = [best_pools(scores[:, :view], visible, count=8) for view in (30, 64, 128, 256)]
    assert all(torch.equal(chosen[0], other) for other in chosen)
    assert chosen[0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_best_pools_treat_both_zeros_alike():
    scores = torch.tensor([[-0.0, 0.0, -0.0]])
    assert best_pools(scores, torch.tensor([3]), count=3).tolist() == [[0, 1, 2]]


def test_hidden_pools_may_score_anything():
    scores = torch.tensor([[1.0, float("nan"), float("inf"), 2.0]])
    assert best_pools(scores, torch.tensor([1]), count=2).tolist() == [[0, -1]]


def test_pools_of_no_score_leave_no_number_that_is_no_pool():
    chosen = np.full(4, 99)
    choose(np.array([np.nan, 1.0, 2.0, np.nan], np.float32), chosen)
    assert set(chosen.tolist()) <= {-1, 0, 1, 2, 3}


@pytest.mark.parametrize("pool", [1, 2, 4, 8])
def test_selected_tokens_are_the_pools_and_the_open_one(pool):
    for position in range(40):
        finished = (position + 1) // pool
        pools = torch.tensor([[number if number < finished else -1 for number in (3, 0, 7)]])
        got = selected_tokens(pools, torch.tensor([position]), pool=pool)[0].tolist()
        wanted = {p * pool + i for p in pools[0].tolist() if p >= 0 for i in range(pool)}
        wanted |= set(range(finished * pool, position + 1))
        assert {token for token in got if token >= 0} == wanted
        assert len(got) == 3 * pool + pool - 1


def test_a_row_that_takes_no_part_selects_nothing():
    assert set(selected_tokens(torch.tensor([[-1]]), torch.tensor([-1]), pool=4)[0].tolist()) == {
        -1
    }


def test_pool_keys_weigh_each_channel_by_its_own_softmax():
    rows, ape = torch.randn(3, 4, 2, 5), torch.randn(4, 5)
    got = pool_keys(rows, ape)
    for p in range(3):
        for c in range(5):
            weights = torch.softmax(rows[p, :, 1, c] + ape[:, c], dim=0)
            assert math.isclose(got[p, c], float((weights * rows[p, :, 0, c]).sum()), abs_tol=ATOL)


def test_pool_scores_equal_their_definition():
    query, keys, weights = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 3, 5)
    got = pool_scores(query, keys, weights)
    products = torch.einsum("bthd,bpd->bthp", query, keys).mul(8**-0.5).relu()
    wanted = torch.einsum("bthp,bth->btp", products, weights * 5**-0.5)
    assert torch.allclose(got, wanted, atol=ATOL)


def attend(query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [H, D] over rows [n, D], in float64."""
    query, rows = query.double(), rows.double()
    return torch.softmax(query @ rows.T * scale, dim=-1) @ rows


def test_indexed_attention_sees_listed_rows_only():
    query, cache = torch.randn(4, 2, 6), torch.randn(30, 6)
    index = torch.randint(0, 20, (4, 9))
    index[0, 3:], index[1, ::2], index[3] = -1, -1, -1
    cache[20:] = float("nan")
    cache[0] = float("inf")
    index.masked_fill_(index == 0, 1)
    got = indexed_attention(query, cache, index, scale=0.3)
    for r in range(3):
        wanted = attend(query[r], cache[index[r][index[r] >= 0]], 0.3)
        assert torch.allclose(got[r].double(), wanted, atol=ATOL)
    assert not got[3].any()


def test_indexed_attention_in_blocks_equals_one_block(monkeypatch):
    query, cache = torch.randn(11, 2, 6), torch.randn(30, 6)
    index = torch.randint(-1, 30, (11, 5))
    whole = indexed_attention(query, cache, index, scale=1.0)
    monkeypatch.setattr(attention_reference, "BLOCK_ELEMENTS", 3 * 5 * 6)
    assert torch.allclose(indexed_attention(query, cache, index, scale=1.0), whole, atol=ATOL)


@pytest.mark.parametrize("block", [1 << 23, 200])
def test_causal_attention_equals_a_loop_over_visible_positions(monkeypatch, block):
    monkeypatch.setattr(attention_reference, "BLOCK_ELEMENTS", block)
    query, cache = torch.randn(2, 5, 3, 6), torch.randn(50, 6)
    read = torch.randint(0, 50, (2, 8))
    seen = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    hidden = torch.arange(8) > seen.unsqueeze(2)
    bias = torch.zeros(2, 5, 8).masked_fill(hidden, float("-inf"))
    got = causal_attention(query, cache, read.view(-1), bias, scale=0.4)
    for b in range(2):
        for t in range(5):
            rows = cache[read[b, : int(seen[b, t]) + 1]]
            assert torch.allclose(got[b, t].double(), attend(query[b, t], rows, 0.4), atol=ATOL)


def test_shapes_are_checked():
    with pytest.raises(ContractViolation, match=r"query has shape \[2, 1, 4\]"):
        indexed_attention(torch.zeros(2, 1, 4), torch.zeros(3, 5), torch.zeros(2, 1), scale=1.0)
    with pytest.raises(ContractViolation, match="visible"):
        best_pools(torch.zeros(2, 3), torch.zeros(1), count=1)
    with pytest.raises(ContractViolation, match="bias"):
        causal_attention(
            torch.zeros(1, 2, 1, 4),
            torch.zeros(3, 4),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(1, 1, 2),
            scale=1.0,
        )

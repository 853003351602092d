"""Pool scores and the best pools on CUDA: sets exactly, ties to the lower pool."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.pooled_index import reference
from flare_ray.device.ops.pooled_index.api import best_pools, pool_scores
from tests.gpu.kernels import BFLOAT16_L2, error, replayed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pools", [513, 15_000])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, BFLOAT16_L2), (torch.float32, 2e-6)])
def test_scores_equal_the_reference(weighted, pools, dtype, most):
    torch.manual_seed(pools)
    made = {"dtype": dtype, "device": "cuda"}
    query, keys = torch.randn((2, 3, 32, 128), **made), torch.randn((2, pools, 128), **made)
    weights = torch.randn((2, 3, 32), **made) if weighted else None
    got = pool_scores(query, keys, weights)
    double = None if weights is None else weights.double()
    wanted = reference.pool_scores(query.float(), keys.float(), double)
    assert error(got, wanted) <= most


@pytest.mark.parametrize("count", [1, 512])
@pytest.mark.parametrize("pools", [300, 15_000, 60_000])
def test_best_pools_are_the_references_with_many_ties(count, pools):
    torch.manual_seed(count)
    scores = torch.randn((3, 2, pools), device="cuda")
    scores[0] = scores[0].clamp(min=0)  # half of them equal
    scores[1, 0] = scores[1, 0].round()
    scores[1, 1] = -0.0
    scores[1, 1, ::3] = 0.0
    scores[2] = scores[2].abs().neg()
    visible = torch.tensor([[pools, pools - 7], [pools, pools], [400, 0]], device="cuda")
    got = best_pools(scores, visible, count=count)
    wanted = reference.best_pools(scores.cpu(), visible.cpu(), count=count)
    assert torch.equal(got.cpu().sort(-1).values, wanted.sort(-1).values)
    assert torch.equal(replayed(lambda: best_pools(scores, visible, count=count)), got)

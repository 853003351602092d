"""Log-probabilities against float64, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare_ray.contracts.record import unpack_scores
from flare_ray.device.sampling.scores import (
    FIRST_ID,
    FIRST_LOGPROB,
    SCORE_WORDS,
    best_tokens,
    write_scores,
)

ROUNDING = 2e-6  # float32 logsumexp of a hundred terms


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_scores_equal_a_float64_log_softmax(top):
    logits = torch.randn(2, 3, 101) * 4
    tokens = torch.randint(0, 101, (2, 3))
    scores = torch.full((2, 3, SCORE_WORDS), 7, dtype=torch.int32)
    write_scores(logits, tokens, top, scores)
    exact = torch.log_softmax(logits.double(), -1)
    chosen = scores[..., 0].view(torch.float32)
    assert (chosen - exact.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).abs().max() < ROUNDING
    ids = scores[..., FIRST_ID : FIRST_ID + top].long()
    found = scores[..., FIRST_LOGPROB : FIRST_LOGPROB + top].view(torch.float32)
    best = exact.sort(dim=-1, descending=True)
    assert torch.equal(ids, best.indices[..., :top])
    if top:
        assert (found - best.values[..., :top]).abs().max() < ROUNDING


def test_ties_come_in_order_of_id_and_the_last_place_goes_to_the_lowest():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    ids, values = best_tokens(logits, 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert values.tolist() == [[2.0, 2.0, 1.0, 1.0]]


def test_more_alternatives_than_tokens_are_impossible_ones():
    scores = torch.zeros(1, 1, SCORE_WORDS, dtype=torch.int32)
    write_scores(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64), 5, scores)
    words = scores[0, 0].numpy()
    packed = np.concatenate([words[:1], words[FIRST_ID:][:5], words[FIRST_LOGPROB:][:5]]).tobytes()
    (score,) = unpack_scores(packed, 1)
    assert score.top_ids[:3] == (0, 1, 2)
    assert score.top_logprobs[3:] == (float("-inf"),) * 2

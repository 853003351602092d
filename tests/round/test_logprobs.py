"""Log-probabilities of every emitted token, at every width (contract: K4; known fault H-10)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.contracts.record import unpack_scores
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, scripted_rank

PROMPT = (3, 1, 2)
ROUNDING = 2e-6
SCRIPT = Script(vocab_size=24, order=2, seed=9, draft_noise=0.3)
LOUD = Sampling(
    temperature=0.7, top_k=6, top_p=0.8, seed=5, frequency=0.7, repetition=1.3, top_logprobs=4
)


def scored(request):
    """(token, score) of every emitted token, from the records."""
    pairs = []
    for record in request.records:
        if record.tokens:
            scores = unpack_scores(record.scores, len(record.tokens))
            pairs += zip(record.tokens, scores, strict=True)
    return pairs


def assert_exact(request, top):
    pairs = scored(request)
    assert [token for token, _ in pairs] == request.tokens
    history = list(request.prompt)
    table = torch.log_softmax(SCRIPT.table().double(), -1)
    for token, score in pairs:
        exact = table[history[-2] * SCRIPT.vocab_size + history[-1]]
        assert abs(score.logprob - float(exact[token])) < ROUNDING
        best = exact.sort(descending=True, stable=True)
        assert score.top_ids == tuple(best.indices[:top].tolist())
        errors = best.values[:top] - torch.tensor(score.top_logprobs, dtype=torch.float64)
        assert top == 0 or errors.abs().max() < ROUNDING
        history.append(token)


@pytest.mark.parametrize("width", range(1, 9))
def test_every_emitted_token_has_the_models_own_logprob(width):
    """Penalties and filters change what is drawn, not what is reported."""
    request = Driver(scripted_rank(SCRIPT)).generate(PROMPT, width=width, budget=40, sampling=LOUD)
    assert_exact(request, 4)


@pytest.mark.parametrize("width", [1, 5])
def test_lanes_with_other_numbers_of_alternatives_share_a_round(width):
    driver = Driver(scripted_rank(SCRIPT))
    tops = (3, -1, 0, 20)
    samplings = [Sampling(1.0, 0, seed=top + 1, top_logprobs=top) for top in tops]
    opened = [driver.open(PROMPT, i, budget=30, sampling=s) for i, s in enumerate(samplings)]
    requests = driver.prefill(opened)
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, width)
    for request, top in zip(requests, tops, strict=True):
        if top < 0:
            assert all(record.scores == b"" for record in request.records)
        else:
            assert_exact(request, top)


def test_no_scores_travel_where_nobody_asks():
    driver = Driver(scripted_rank(SCRIPT))
    driver.generate(PROMPT, width=4, budget=12)
    assert all(reply.scores == () for replies in driver.replies for reply in replies)

"""Sampling features on real arithmetic: no width changes what one-token execution gives, in every
recipe (contract: K3, K4, S8)."""

from __future__ import annotations

import math

import pytest

from flare_ray.config import EngineConfig
from flare_ray.contracts.plan import LanePlan, LogitRule
from flare_ray.contracts.record import unpack_scores
from flare_ray.controller.history.prediction import PredictionFollower
from flare_ray.controller.verification import ProposalSource
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import prepare_rank
from tests.recipes.test_prefix_reuse import RECIPES
from tests.support.scripted.harness import Driver, Request, Sampling

PROMPT = (5, 9, 2, 9, 7, 1)
BUDGET = 24
LOGPROB_ATOL = 1e-4
"""Bound of the contract for float32 logits."""
PENALISED = {
    "repetition": 1.3,
    "presence": 0.4,
    "frequency": 0.2,
    "rules": (LogitRule(3, 1.0), LogitRule(8, -math.inf, 12)),
    "bad_words": ((4,), (9, 2)),
}
SAMPLINGS = {
    "greedy": Sampling(top_logprobs=3),
    "greedy_penalised": Sampling(**PENALISED, top_logprobs=3),
    "reproducible": Sampling(1.0, 0, seed=3, coupled=True, top_logprobs=3),
    "reproducible_all": Sampling(0.8, 40, 0.95, seed=4, coupled=True, top_logprobs=3, **PENALISED),
}


@pytest.fixture(scope="module", params=sorted(RECIPES))
def driver(request, tmp_path_factory) -> Driver:
    folder = RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))
    config = EngineConfig(
        checkpoint=str(folder),
        device="cpu",
        dtype="float32",
        concurrency=2,
        context_tokens=128,
        prefill_tokens=64,
    )
    return Driver(prepare_rank(config, SingleGroup()))


def scores_of(request: Request) -> list[float]:
    return [
        score.logprob
        for record in request.records
        if record.tokens
        for score in unpack_scores(record.scores, len(record.tokens))
    ]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_width_gives_the_text_and_logprobs_of_one_token_execution(driver, name):
    sampling = SAMPLINGS[name]
    single = driver.generate(PROMPT, width=1, budget=BUDGET, sampling=sampling, speculation=False)
    expected = scores_of(single)
    assert len(expected) == len(single.tokens)
    widths = sorted({s.verify_width for s in driver.manifest.shapes if s.draft_tokens})
    for width in (1, *widths):
        found = driver.generate(PROMPT, width=width, budget=BUDGET, sampling=sampling)
        assert found.tokens == single.tokens
        differences = [abs(a - b) for a, b in zip(scores_of(found), expected, strict=True)]
        assert max(differences) < LOGPROB_ATOL


@pytest.mark.parametrize("name", ["greedy", "reproducible_all"])
def test_a_predicted_output_gives_the_text_of_one_token_execution(driver, name):
    """Contract H3: right copies, a wrong one in the middle, right ones again."""
    sampling = SAMPLINGS[name]
    single = driver.generate(PROMPT, width=1, budget=BUDGET, sampling=sampling, speculation=False)
    prediction = list(single.tokens)
    prediction[8] = (prediction[8] + 1) % driver.manifest.vocab_size
    width = max(s.verify_width for s in driver.manifest.shapes)
    opened = driver.open(PROMPT, 0, budget=BUDGET, sampling=sampling)
    (request,) = driver.prefill([opened])
    follower, taken, copied = PredictionFollower(prediction), 0, 0
    while not request.ended:
        follower.advance(request.tokens[taken:])
        taken = len(request.tokens)
        copies = follower.propose(width - 1)
        sources = (int(ProposalSource.REQUEST),) * len(copies)
        lane = LanePlan(request.slot, request.epoch, width - 1, copies, sources)
        (record,) = driver.round([request], width, lanes=[lane])
        copied += min(record.accepted, len(copies))
    driver.close(request)
    assert request.tokens == single.tokens
    assert copied >= BUDGET // 3

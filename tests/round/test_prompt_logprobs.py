"""Log-probabilities of prompt tokens, and those of the distribution drawn from (contract: K4)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from flare_ray.contracts.plan import PrefillLane, RoundPlan
from flare_ray.contracts.record import unpack_scores
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.executor import RankExecutor
from tests.round.test_logprobs import ROUNDING, SCRIPT, scored
from tests.support.exact_sampling import filtered, next_logits
from tests.support.no_sync import NoHostWait
from tests.support.scripted.harness import Driver, Sampling, scripted_rank

PROMPT = tuple(range(5, 24)) + tuple(range(12)) + (3, 1, 2)
TOP = 3
FAMILIES = (True, False)


def score_prompt(driver: Driver, prompt: tuple[int, ...], cuts: list[int], speculation: bool):
    """Scores of a prompt consumed in chunks that end at `cuts`, and the request."""
    request, init, grant = driver.open(prompt, 0, sampling=Sampling(top_logprobs=1))
    init = msgspec.structs.replace(init, prompt_logprobs=TOP)
    shape = driver.shape(GraphKind.SCORED_PREFILL, 1, 1, speculation)
    scores = []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        final = end == len(prompt)
        behind = -1 if final else prompt[end]
        lane = PrefillLane(0, init.epoch, start, prompt[start:end], final, next_token=behind)
        plan = RoundPlan(
            round_id=next(driver.round_ids),
            shape=shape,
            inits=(init,) if start == 0 else (),
            grants=(grant,) if start == 0 else (),
            prefill=(lane,),
        )
        [record] = driver.submit(plan)
        request.records.append(record)
        request.tokens.extend(record.tokens)
        rows = end - start - final
        if rows:
            scores += unpack_scores(record.prompt_scores, rows)
    return scores, request


def exact_rows(prompt):
    table = torch.log_softmax(SCRIPT.table().double(), -1)
    before = (0, *prompt)
    for place in range(1, len(prompt)):
        yield table[before[place - 1] * SCRIPT.vocab_size + before[place]]


@pytest.mark.parametrize("speculation", FAMILIES)
@pytest.mark.parametrize("cuts", [[34], [1, 34], [16, 33, 34], [7, 20, 34]])
def test_every_prompt_token_has_the_models_own_logprob_however_the_prompt_is_cut(cuts, speculation):
    scores, request = score_prompt(Driver(scripted_rank(SCRIPT)), PROMPT, cuts, speculation)
    assert len(scores) == len(PROMPT) - 1
    for token, score, exact in zip(PROMPT[1:], scores, exact_rows(PROMPT), strict=True):
        assert abs(score.logprob - float(exact[token])) < ROUNDING
        best = exact.sort(descending=True, stable=True)
        assert score.top_ids == tuple(best.indices[:TOP].tolist())
    [(token, score)] = scored(request)
    assert score.top_ids == (token,)  # greedy: the first token is the best one


def test_scored_prompt_leaves_the_state_of_a_plain_one():
    plain = Driver(scripted_rank(SCRIPT))
    expected = plain.generate(PROMPT, width=4, budget=16)
    driver = Driver(scripted_rank(SCRIPT))
    _, request = score_prompt(driver, PROMPT, [7, 34], True)
    while not request.ended:
        driver.round([request], 4)
    assert request.tokens == expected.tokens


def test_scoring_a_prompt_never_waits_for_the_device():
    driver = Driver(scripted_rank(SCRIPT))
    score_prompt(driver, PROMPT, [34], True)
    program = driver.ranks[0].backend.program(driver.shape(GraphKind.SCORED_PREFILL, 1, 1, True))
    with torch.inference_mode(), NoHostWait():
        program.replay()


def processed_rank() -> RankExecutor:
    rank = scripted_rank(SCRIPT)
    rank.manifest = msgspec.structs.replace(rank.manifest, processed_logprobs=True)
    return rank


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_processed_logprobs_are_those_of_the_distribution_drawn_from(width):
    sampling = Sampling(
        temperature=0.7, top_k=6, top_p=0.9, seed=5, frequency=0.7, repetition=1.3, top_logprobs=4
    )
    driver = Driver(processed_rank())
    request = driver.generate(PROMPT, width=width, budget=30, sampling=sampling)
    history: list[int] = []
    for token, score in scored(request):
        probs = filtered(next_logits(SCRIPT, sampling, PROMPT, history), sampling)
        assert abs(score.logprob - np.log(probs[token])) < 1e-5
        order = np.argsort(-probs, kind="stable")[:4]
        kept = [int(i) for i in order if probs[i] > 0]
        assert score.top_ids[: len(kept)] == tuple(kept)
        assert all(value == float("-inf") for value in score.top_logprobs[len(kept) :])
        history.append(token)


def test_mode_of_logprobs_changes_no_text():
    sampling = Sampling(temperature=0.9, top_k=0, top_p=0.9, seed=5, top_logprobs=2)
    texts = [
        Driver(rank).generate(PROMPT, width=5, budget=30, sampling=sampling).tokens
        for rank in (processed_rank(), scripted_rank(SCRIPT))
    ]
    assert texts[0] == texts[1]

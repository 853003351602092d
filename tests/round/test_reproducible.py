"""The reproducible mode: one text per seed whatever the schedule, by the exact law (contract: S8).

Ranks, restored prefixes and chunks are covered by the same texts: nothing but (seed, position) keys
a draw.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from flare_ray.contracts.plan import LanePlan
from flare_ray.device.sampling.coupled import Coupling, coupled_draws
from tests.support.exact_sampling import filtered, next_logits, p_value
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Request, Sampling, Setup, scripted_rank

PROMPT = (3, 1, 2)
ALPHA = 1e-4
CAUGHT = 1e-9
SCRIPT = Script(vocab_size=10, order=2, seed=4, spread=1.0, draft_noise=0.4)
COUPLED = Sampling(temperature=0.9, top_k=0, top_p=0.97, seed=11, coupled=True)
BUDGET = 40


def alone(sampling: Sampling, *, budget: int = BUDGET) -> list[int]:
    """Width one, ordinary family: no drafter takes part."""
    driver = Driver(scripted_rank(SCRIPT))
    request = driver.generate(PROMPT, width=1, budget=budget, sampling=sampling, speculation=False)
    return request.tokens


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedules", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_schedules_give_one_text(schedules):
    """Widths, ceilings, chunks, lanes, slots, neighbours of either mode; four texts a schedule.

    Their seeds repeat, so each text is compared with the one that its seed gives alone.
    """
    texts = {seed: alone(replace(COUPLED, seed=seed)) for seed in range(5)}
    dice = random.Random(7)
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=4)))
    for _ in range(schedules):
        seeds = [dice.randrange(5) for _ in range(4)]
        modes = [dice.random() < 0.75 for _ in range(4)]
        slots = dice.sample(range(4), 4)
        samplings = [
            replace(COUPLED, seed=seed, coupled=mode)
            for seed, mode in zip(seeds, modes, strict=True)
        ]
        opened = [
            driver.open(PROMPT, slot, budget=BUDGET, sampling=sampling)
            for slot, sampling in zip(slots, samplings, strict=True)
        ]
        requests = driver.prefill(opened, chunk=dice.randint(1, 3))
        while alive := [request for request in requests if not request.ended]:
            group = dice.sample(alive, dice.randint(1, len(alive)))
            width = dice.randint(1, 8)
            lanes = [LanePlan(r.slot, r.epoch, dice.randrange(width)) for r in group]
            driver.round(group, width, lanes=lanes)
        for request, seed, mode in zip(requests, seeds, modes, strict=True):
            driver.close(request)
            assert not mode or request.tokens == texts[seed]


def test_seeds_give_different_texts():
    assert len({tuple(alone(replace(COUPLED, seed=seed))) for seed in range(6)}) == 6


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(
    "extra", [{}, {"top_k": 4, "min_p": 0.05}, {"presence": 1.0, "repetition": 1.2}]
)
def test_texts_follow_the_exact_conditional_law(width, extra):
    sampling = replace(COUPLED, **extra)
    outputs = sampled(sampling, width)

    def law(prompt, output):
        return filtered(next_logits(SCRIPT, sampling, prompt, output), sampling)

    assert p_value([(r.prompt, r.tokens) for r in outputs], law, seed=3) > ALPHA


def sampled(sampling: Sampling, width: int, lanes: int = 8, tokens: int = 300) -> list[Request]:
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=lanes, context_tokens=512)))
    opened = [
        driver.open(PROMPT, lane, budget=tokens, sampling=replace(sampling, seed=lane))
        for lane in range(lanes)
    ]
    requests = driver.prefill(opened)
    while alive := [request for request in requests if not request.ended]:
        driver.round(alive, width)
    return requests


def acceptance(requests: list[Request]) -> float:
    records = [record for request in requests for record in request.records]
    return sum(r.accepted for r in records) / sum(r.offered for r in records)


def test_shared_noise_keeps_acceptance_near_the_plain_modes():
    plain = acceptance(sampled(replace(COUPLED, coupled=False), 5))
    coupled = acceptance(sampled(COUPLED, 5))
    assert coupled > 0.8 * plain


def test_drafts_with_noise_of_their_own_lose_most_acceptance(monkeypatch):
    """The control of the test above: plain draws agree with the target's only by chance."""
    kept = acceptance(sampled(COUPLED, 5))
    monkeypatch.setattr(
        "flare_ray.device.speculation.proposal.coupled_draws",
        lambda probs, coupling, depth, *, power: coupled_draws(
            probs, coupling, depth + 1000, power=power
        ),
    )
    assert acceptance(sampled(COUPLED, 5)) < 0.7 * kept


def test_one_position_has_one_draw_whatever_the_shape_of_the_call():
    probs = torch.softmax(torch.randn(3, 8, 50), -1)
    keys, first = torch.tensor([5, -9, 2**62]), torch.tensor([0, 77, 2**31])
    whole = coupled_draws(probs, Coupling(torch.ones(3).bool(), keys, first))
    for lane in range(3):
        for row in range(8):
            one = Coupling(torch.ones(1).bool(), keys[lane : lane + 1], first[lane : lane + 1])
            part = probs[lane : lane + 1, row : row + 1]
            assert int(coupled_draws(part, one, row)) == int(whole[lane, row])


def test_draws_have_the_given_probabilities():
    rows, weights = 20000, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    coupling = Coupling(torch.ones(1).bool(), torch.tensor([123]), torch.tensor([0]))
    found = coupled_draws(weights.expand(1, rows, 6), coupling)[0]
    counts = np.bincount(found.numpy(), minlength=6)
    assert counts[5] == 0
    deviations = (counts[:5] - rows * weights[:5].numpy()) / np.sqrt(rows * weights[:5].numpy())
    assert (deviations**2).sum() < 23.5  # chi-square, 4 degrees, 1e-4

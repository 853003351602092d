"""Which draw decides what: the whole stream law, against a loop (contract: S4, S5, S9)."""

import pytest

from flare_ray.contracts.plan import LanePlan
from tests.round.twin import Twin
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, Setup, scripted_rank

SCRIPT = Script(vocab_size=16, order=2, seed=21, draft_noise=0.7)
PROMPT = (1, 2, 3, 4)
SAMPLINGS = [
    Sampling(0.7, 0, 1.0, 0.0, seed=1),
    Sampling(1.0, 5, 1.0, 0.0, seed=2**64 - 1),
    Sampling(1.3, 0, 0.8, 0.0, seed=3),
    Sampling(1.0, 0, 1.0, 0.1, seed=4),
    Sampling(1.0, 1, 1.0, 0.0, seed=5),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", range(1, 9))
def test_text_equals_the_loop_model_at_every_width(width, sampling):
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=60, sampling=sampling)])
    twin = Twin(SCRIPT, sampling, PROMPT)
    while not request.ended:
        left = request.records[-1].budget_left
        (record,) = driver.round([request], width)
        assert twin.round(min(width - 1, left - 1)) == record.accepted
    assert request.tokens == twin.output


@pytest.mark.parametrize("ceiling", range(8))
def test_lane_shorter_than_its_graph_follows_the_law_of_its_own_length(ceiling):
    sampling = SAMPLINGS[0]
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=200, sampling=sampling)])
    twin = Twin(SCRIPT, sampling, PROMPT)
    for _ in range(15):
        driver.round([request], 8, lanes=[LanePlan(0, request.epoch, ceiling)])
        twin.round(ceiling)
    assert request.tokens == twin.output


def test_ordinary_and_width_one_speculative_rounds_draw_alike():
    texts = [
        Driver(scripted_rank(SCRIPT, Setup(slots=1)))
        .generate(PROMPT, width=1, budget=60, sampling=SAMPLINGS[0], speculation=speculation)
        .tokens
        for speculation in (True, False)
    ]
    assert texts[0] == texts[1]


def test_seed_decides_the_text_and_nothing_else_does():
    """The fault kind of H-09: alone, again, in another slot beside others, with another seed."""

    def alone(seed: int, slot: int = 0) -> list[int]:
        driver = Driver(scripted_rank(SCRIPT))
        sampling = Sampling(1.0, 0, seed=seed)
        return driver.generate(PROMPT, width=6, slot=slot, budget=40, sampling=sampling).tokens

    driver = Driver(scripted_rank(SCRIPT, Setup(slots=8)))
    seeds = (7, 11, 12, 13, 14, 15, 16, 17)
    requests = driver.prefill(
        [
            driver.open(PROMPT, s, budget=40, sampling=Sampling(1.0, 0, seed=seed))
            for s, seed in enumerate(seeds)
        ]
    )
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive[::-1], 6)
    assert alone(7) == alone(7) == alone(7, slot=3) == requests[0].tokens
    assert alone(8) != alone(7)


def test_resumed_request_goes_on_with_the_same_stream():
    """No generator state: the draws follow from the consumed count alone."""
    sampling = SAMPLINGS[2]
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=2)))
    whole = driver.generate(PROMPT, width=4, budget=60, sampling=sampling)
    (first,) = driver.prefill([driver.open(PROMPT, 0, budget=60, sampling=sampling)])
    for _ in range(4):
        driver.round([first], 4)
    tokens, left = list(first.tokens), first.records[-1].budget_left
    opened = driver.open((*PROMPT, *tokens[:-1]), 1, budget=left, sampling=sampling)
    (resumed,) = driver.prefill([opened], pending=tokens[-1])
    while not resumed.ended:
        driver.round([resumed], 4)
    assert tokens + resumed.tokens == whole.tokens

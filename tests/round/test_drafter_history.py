"""The drafter's cache holds target-derived pairs only, max(N - 1, 0) of them (contract: R8; the
fault kind of H-19)."""

import pytest
import torch

from tests.round.live_state import pairs_of
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

PROMPT = (3, 1, 4, 1, 5)


def cached_pairs(driver: Driver, request) -> torch.Tensor:
    stored = driver.ranks[0].store.groups["pair_pages"]
    count = request.records[-1].draft_position
    return stored[list(request.pages)].flatten(0, 1)[:count]


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("right", range(8))
def test_h19_cache_equals_teacher_forced_rows_after_every_accepted_count(width, right):
    script = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=right)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=90)])
    while not request.ended:
        driver.round([request], width)
        record = request.records[-1]
        history = [*request.prompt, *request.tokens][: record.consumed]
        assert record.draft_position == record.consumed - 1
        assert torch.equal(cached_pairs(driver, request), pairs_of(history))


def test_cache_check_catches_a_pair_left_from_a_proposal(monkeypatch):
    """Control: without re-absorption after acceptance, draft-derived rows stay in the cache."""
    monkeypatch.setattr("flare_ray.device.speculation.round.absorb_accepted", lambda *_: None)
    script = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=4)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=90)])
    driver.round([request], 5)
    history = [*request.prompt, *request.tokens][: request.records[-1].consumed]
    assert not torch.equal(cached_pairs(driver, request), pairs_of(history))


def test_width_one_rounds_keep_absorbing_so_that_drafting_resumes():
    script = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=7)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=60)])
    for _ in range(20):
        driver.round([request], 1)
    (record,) = driver.round([request], 8)
    assert record.accepted == 7

"""Copy tokens replace native proposals with a point-mass q (contract: S1, H2)."""

import pytest

from flare_ray.contracts.plan import LanePlan
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Sampling, Setup, scripted_rank

PROMPT = (1, 2, 3, 4, 5)
BUDGET = 40


def wrong_script() -> Script:
    """Native proposals are always rejected."""
    return Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=0)


def copying(driver: Driver, request, copies: tuple[int, ...], width: int):
    lane = LanePlan(
        request.slot,
        request.epoch,
        width - 1,
        copy_tokens=copies,
        copy_sources=(1,) * len(copies),
    )
    return driver.round([request], width, lanes=[lane])[0]


@pytest.mark.parametrize("count", range(1, 8))
def test_right_copies_are_accepted_and_reported_by_bits(count):
    script = wrong_script()
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    text = plain_text(script, budget=BUDGET)
    record = copying(driver, request, tuple(text[1 : 1 + count]), 8)
    assert record.accepted == count
    assert record.copy_bits == 2**count - 1
    while not request.ended:
        driver.round([request], 4)
    assert request.tokens == text


def test_copies_at_some_depths_leave_the_others_to_the_drafter():
    script = Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=7)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    text = plain_text(script, budget=BUDGET)
    record = copying(driver, request, (-1, text[2], -1, text[4]), 8)
    assert (record.accepted, record.copy_bits) == (7, 0b1010)


def test_drafter_continues_after_the_copied_token():
    """A copy the drafter would not have proposed: its next proposals must follow the copy."""
    script = Script(vocab_size=16, order=1, seed=6, drafter="prefix", draft_right=7, spread=0.0)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    sampling = Sampling(temperature=1.0, top_k=0, seed=3)
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET, sampling=sampling)])
    seen = []
    model = driver.ranks[0].backend.model.drafter
    original = model._row

    def spy(previous, token, broken):
        seen.append(int(token[0]))
        return original(previous, token, broken)

    model._row = spy
    copying(driver, request, (11, 12), 4)
    assert seen[1:] == [11, 12]


def test_wrong_copy_is_rejected_and_corrected():
    script = wrong_script()
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    text = plain_text(script, budget=BUDGET)
    wrong = (text[1] + 1) % 16
    record = copying(driver, request, (wrong, text[2]), 4)
    assert (record.accepted, record.emitted, record.copy_bits) == (0, 1, 0b11)
    while not request.ended:
        driver.round([request], 4)
    assert request.tokens == text


def test_copies_beyond_the_ceiling_are_neither_offered_nor_reported():
    script = wrong_script()
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    text = plain_text(script, budget=BUDGET)
    lane = LanePlan(0, request.epoch, 2, tuple(text[1:6]), (1,) * 5)
    (record,) = driver.round([request], 8, lanes=[lane])
    assert (record.offered, record.accepted, record.copy_bits) == (2, 2, 0b11)

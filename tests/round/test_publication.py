"""The state at a crossed 64-boundary, copied by the round that crossed it (contract: M4)."""

import pytest
import torch

from flare_ray.device.state.layout import Core, Published
from tests.round.live_state import GUARANTEED, pairs_of
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank
from tests.support.scripted.state import KEEP, RING, powers, signature

BOUNDARY = 64


def script(right: int = 7) -> Script:
    return Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=right)


def engine(right: int = 7, **changes) -> Driver:
    fields = {"slots": 2, "publication": True, "prefill_tokens": 256}
    return Driver(scripted_rank(script(right), Setup(**{**fields, **changes})))


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((5 * i * i + i) % 16 for i in range(length))


def check_published(driver: Driver, request, boundary: int) -> None:
    """Every part of the slot's publication row against the history itself."""
    publication = driver.ranks[0].store.publication
    slot = request.slot
    history = [*request.prompt, *request.tokens][:boundary]
    ids = torch.tensor(history)
    hashed = ((ids + 1) * powers(boundary)).sum()
    rows = publication.rows
    assert publication.published[slot].tolist() == [request.epoch, boundary]
    assert rows["hash_column"][slot] == hashed
    assert rows["recent_window"][slot].tolist() == [t + 1 for t in history[-KEEP:]]
    last = torch.arange(boundary - GUARANTEED, boundary)
    assert torch.equal(rows["recent_ring"][slot, last % RING], (ids[last] + 1).float())
    pairs = torch.arange(boundary - 1 - GUARANTEED, boundary - 1)
    assert torch.equal(rows["pair_ring"][slot, pairs % RING], pairs_of(history)[pairs])
    sign = float(signature(hashed))
    assert publication.tail[slot].tolist() == [sign, history[-1]]
    row = history[-2] * 16 + history[-1]
    vector = publication.sampling_vector[slot].tolist()
    assert vector == [sign, history[-1], boundary - 1, row]


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("boundary", [BOUNDARY, 2 * BOUNDARY])
def test_row_that_ends_at_a_boundary_is_published(row, boundary):
    driver = engine()
    opened = driver.open(prompt_of(boundary - 1 - row), 1, budget=20)
    (request,) = driver.prefill([opened])
    driver.round([request], 8)
    assert request.records[-1].emitted == 8
    check_published(driver, request, boundary)


def test_publication_survives_the_rounds_that_follow():
    driver = engine()
    (request,) = driver.prefill([driver.open(prompt_of(60), 0, budget=40)])
    for _ in range(4):
        driver.round([request], 8)
    check_published(driver, request, BOUNDARY)


@pytest.mark.parametrize("length", [56, 62])
def test_boundary_crossed_by_rejected_rows_only_is_not_published(length):
    driver = engine(right=0)
    (request,) = driver.prefill([driver.open(prompt_of(length), 0, budget=40)])
    driver.round([request], 8)
    published = driver.ranks[0].store.publication.published
    assert published[0].tolist() == [0, 0]


def test_prompt_chunk_that_ends_at_a_boundary_is_published():
    driver = engine()
    (request,) = driver.prefill([driver.open(prompt_of(100), 0, budget=4)], chunk=BOUNDARY)
    check_published(driver, request, BOUNDARY)


def test_prompt_chunk_that_passes_a_boundary_is_not_published():
    driver = engine()
    driver.prefill([driver.open(prompt_of(100), 0, budget=4)], chunk=99)
    published = driver.ranks[0].store.publication.published
    assert published[0].tolist() == [0, 0]


def test_new_owner_of_a_slot_has_published_nothing():
    driver = engine()
    driver.prefill([driver.open(prompt_of(64), 0, budget=4)])
    driver.prefill([driver.open(prompt_of(5), 0, budget=4)])
    published = driver.ranks[0].store.publication.published
    assert int(published[0, Published.CONSUMED]) == 0


def test_lanes_that_cross_nothing_leave_published_rows_alone():
    driver = engine()
    still, crossing = driver.prefill(
        [driver.open(prompt_of(64), 0, budget=40), driver.open(prompt_of(10), 1, budget=90)],
    )
    check_published(driver, still, BOUNDARY)
    while int(driver.ranks[0].store.request.core[1, Core.CONSUMED]) < 70:
        driver.round([r for r in (still, crossing) if not r.ended], 8)
    check_published(driver, still, BOUNDARY)
    check_published(driver, crossing, BOUNDARY)


def test_publication_does_not_change_the_text():
    texts = []
    for publication in (False, True):
        driver = engine(publication=publication)
        texts.append(driver.generate(prompt_of(50), width=8, budget=100).tokens)
    assert texts[0] == texts[1] == plain_text(script(), prompt_of(50), 100)


def test_stale_column_would_be_caught():
    """Control: the state one row earlier is not what the check expects."""
    driver = engine()
    (request,) = driver.prefill([driver.open(prompt_of(60), 1, budget=20)])
    driver.round([request], 8)
    store = driver.ranks[0].store
    with torch.inference_mode():
        store.publication.rows["hash_column"][1] = store.groups["hash_column"][1, 2]
    with pytest.raises(AssertionError):
        check_published(driver, request, BOUNDARY)

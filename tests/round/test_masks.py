"""One mask per candidate position, the bonus row included (contract: K1)."""

import numpy as np
import pytest

from flare_ray.contracts.plan import LanePlan, PrefillLane, RoundPlan
from flare_ray.contracts.record import Flag, Status
from flare_ray.contracts.shapes import GraphKind
from flare_ray.device.sampling.masks import mask_words
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

VOCABULARY = 40
SCRIPT = Script(vocab_size=VOCABULARY, order=2, seed=12)
PROMPT = (1, 2, 3)


def mask_of(allowed: np.ndarray) -> np.ndarray:
    """[rows, words] int32 from [rows, V] bool."""
    vocabulary = allowed.shape[1]
    padded = np.zeros((len(allowed), mask_words(vocabulary) * 32), dtype=bool)
    padded[:, :vocabulary] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def constrained_text(tokens: list[int], allowed: np.ndarray) -> list[int]:
    """Greedy continuation of `tokens` under one allowed set per position."""
    table = SCRIPT.table().numpy()
    text = list(tokens)
    for row in allowed:
        logits = np.where(row, table[text[-2] * VOCABULARY + text[-1]], -np.inf)
        text.append(int(logits.argmax()))
    return text[len(tokens) :]


def masked_round(driver: Driver, request, allowed: np.ndarray, copies=(), *, shift: int = 0):
    lane = LanePlan(
        request.slot, request.epoch, len(allowed) - 1, copies, (1,) * len(copies), mask_row=2
    )
    free = np.ones((2, VOCABULARY), dtype=bool)
    block = mask_of(np.concatenate((free, np.roll(allowed, shift, axis=0))))
    return driver.round([request], len(allowed), lanes=[lane], masks=block)[0]


@pytest.mark.parametrize("width", range(1, 9))
def test_every_row_uses_its_own_mask(width, random_seed):
    allowed = np.random.default_rng(random_seed).random((width, VOCABULARY)) < 0.2
    allowed[:, 0] = True
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    expected = constrained_text([*PROMPT, *request.tokens], allowed)
    record = masked_round(driver, request, allowed, tuple(expected[:-1]))
    assert record.accepted == width - 1
    assert list(record.tokens) == expected
    assert record.flags == Flag.MASKED


def test_mask_rows_in_the_wrong_order_are_caught():
    allowed = np.zeros((4, VOCABULARY), dtype=bool)
    allowed[np.arange(4), [5, 6, 7, 8]] = True
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    record = masked_round(driver, request, allowed, (5, 6, 7), shift=1)
    assert list(record.tokens) != [5, 6, 7, 8]
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    assert list(masked_round(driver, request, allowed, (5, 6, 7)).tokens) == [5, 6, 7, 8]


def test_forbidden_native_drafts_are_rejected():
    allowed = np.zeros((3, VOCABULARY), dtype=bool)
    allowed[:, 9] = True
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    record = masked_round(driver, request, allowed)
    assert set(record.tokens) == {9}


def test_unmasked_lane_beside_a_masked_one_is_left_alone():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=2)))
    opened = [driver.open(PROMPT, slot, budget=30) for slot in range(2)]
    requests = driver.prefill(opened)
    allowed = np.zeros((4, VOCABULARY), dtype=bool)
    allowed[:, 9] = True
    while not requests[1].ended:
        alive = [r for r in requests if not r.ended]
        lanes = [LanePlan(r.slot, r.epoch, 3, mask_row=-1 if r.slot else 0) for r in alive]
        driver.round(alive, 4, lanes=lanes, masks=mask_of(allowed))
    assert requests[1].tokens == plain_text(SCRIPT, PROMPT, 30)
    assert set(requests[0].tokens[1:]) == {9}
    assert requests[1].records[-1].flags == Flag.NONE


def test_first_token_obeys_its_mask():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    request, init, grant = driver.open(PROMPT, 0)
    allowed = np.zeros((1, VOCABULARY), dtype=bool)
    allowed[0, 17] = True
    plan = RoundPlan(
        1,
        driver.shape(GraphKind.PREFILL, 1, 0, True),
        (init,),
        (grant,),
        prefill=(PrefillLane(0, request.epoch, 0, PROMPT, True, mask_row=0),),
        context_pages=1,
        mask_block="block",
        mask_rows=1,
    )
    (record,) = driver.submit(plan, mask_of(allowed))
    assert record.tokens == (17,)
    assert record.flags == Flag.PREFILL | Flag.FIRST_TOKEN | Flag.MASKED


def test_mask_that_allows_nothing_ends_the_request_by_name():
    driver = Driver(scripted_rank(SCRIPT, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=30)])
    record = masked_round(driver, request, np.zeros((2, VOCABULARY), dtype=bool))
    assert record.status == Status.ACTIVE | Status.NO_TOKEN

"""A lane whose verified logits are not finite ends alone (known fault: NaN in one row)."""

import pytest
import torch

from flare_ray.contracts.record import Status
from flare_ray.device.state.layout import Core, Phase
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

NEXT = tuple((t + 1) % 16 for t in range(16))
BAD = 9


def script(**changes) -> Script:
    fields = {"vocab_size": 16, "next_tokens": NEXT, "drafter": "prefix", "draft_right": 7}
    return Script(**{**fields, **changes})


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("fault", ["nan_tokens", "dead_tokens"])
def test_lane_with_nonfinite_logits_ends_alone(width, fault):
    rank = scripted_rank(script(**{fault: (BAD,)}))
    driver = Driver(rank)
    # slot 0 meets the bad row after five tokens, slot 1 only at its very end
    requests = driver.prefill([driver.open((4,), 0, budget=30), driver.open((10,), 1, budget=14)])
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, width)
    bad, good = requests
    last = bad.records[-1]
    assert last.status == Status.ACTIVE | Status.NONFINITE
    assert (last.emitted, last.tokens) == (0, ())
    assert good.tokens == plain_text(script(), (10,), 14)
    assert bad.tokens == plain_text(script(), (4,), len(bad.tokens))
    assert int(rank.store.request.core[0, Core.PHASE]) == Phase.ENDED
    rank.check_integrity()
    (record,) = driver.round([bad], width)
    assert record.status == Status.IDLE


def test_nonfinite_rows_beyond_the_offered_drafts_are_nobodys_fault():
    """Width 8 with a budget of three: the row of the bad token is never verified."""
    driver = Driver(scripted_rank(script(nan_tokens=(BAD,)), Setup(slots=1)))
    request = driver.generate((4,), width=8, budget=4)
    assert request.tokens == [5, 6, 7, 8]
    assert request.records[-1].status == Status.ACTIVE | Status.LENGTH


def test_prompt_that_ends_in_nonfinite_logits_ends_in_its_prefill():
    driver = Driver(scripted_rank(script(nan_tokens=(BAD,))))
    bad, good = driver.prefill([driver.open((BAD,), 0), driver.open((1,), 1)])
    assert bad.records[-1].status == Status.ACTIVE | Status.NONFINITE
    assert bad.tokens == []
    assert good.tokens == [2]


def test_slot_serves_again_after_a_nonfinite_request():
    rank = scripted_rank(script(nan_tokens=(BAD,)), Setup(slots=1))
    driver = Driver(rank)
    driver.generate((4,), width=4, budget=30)
    assert driver.generate((10,), width=4, budget=12).tokens == plain_text(script(), (10,), 12)
    assert not torch.isnan(rank.store.request.tail).any()

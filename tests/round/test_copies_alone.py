"""Rounds whose drafts are all copies run no drafter and obey the same law (contract: S1, H2)."""

from __future__ import annotations

import pytest

from flare_ray.contracts.plan import LanePlan, RoundPlan
from flare_ray.contracts.shapes import GraphKind, GraphShape
from tests.round.test_acceptance import plain_text
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Driver, Setup, scripted_rank

PROMPT = (1, 2, 3, 4, 5)
BUDGET = 40
SHAPE = GraphShape(
    kind=GraphKind.SPECULATIVE, batch_capacity=2, token_capacity=4, draft_tokens=3, verify_width=4
)


def script_of() -> Script:
    return Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=7)


def test_no_draft_is_drawn_and_the_text_goes_on_as_it_would(monkeypatch):
    script = script_of()
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    text = plain_text(script, budget=BUDGET)
    drawn = []
    drafter = driver.ranks[0].backend.model.drafter
    propose = type(drafter).propose

    def counted(self, start, groups, sink):
        drawn.append(start.depth)
        propose(self, start, groups, sink)

    monkeypatch.setattr(type(drafter), "propose", counted)
    wrong = (text[8] + 1) % 16
    for copies in (text[1:4], text[5:8], [wrong, *text[9:11]]):
        lane = LanePlan(0, request.epoch, 3, tuple(copies), (1,) * 3)
        (record,) = driver.round([request], 4, lanes=[lane])
    assert set(drawn) == {0}, "a replayed round calls nothing"
    assert (record.accepted, record.emitted, record.copy_bits) == (0, 1, 0b111)
    while not request.ended:
        driver.round([request], 4)
    assert request.tokens == text
    assert 3 in drawn, "the drafter goes on where nothing is copied"


@pytest.mark.parametrize(
    ("lanes", "alone"),
    [
        ([(3, (1, 2, 3))], True),
        ([(2, (1, 2, 3))], True),
        ([(3, (1, 2))], False),
        ([(3, (1, -1, 3))], False),
        ([(3, (1, 2, 3)), (3, ())], False),
        ([(3, (1, 2, 3)), (0, ())], True),
        ([(0, ())], False),
        ([(3, ())], False),
    ],
)
def test_copies_stand_alone_where_every_draft_on_offer_is_one(lanes, alone):
    planned = tuple(
        LanePlan(slot, 1, ceiling, copies, (1,) * len(copies))
        for slot, (ceiling, copies) in enumerate(lanes)
    )
    assert RoundPlan(0, SHAPE, lanes=planned).copies_alone is alone

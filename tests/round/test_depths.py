"""Shapes whose depth, width and batch are independent numbers (contract: G3)."""

import msgspec
import pytest

from flare_ray.contracts.plan import LanePlan, RoundPlan
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.device.executor import ModelParts, RankExecutor
from tests.round.test_randomness import PROMPT, SAMPLINGS, SCRIPT
from tests.round.twin import Twin
from tests.support.scripted.harness import Driver, Setup, scripted_rank
from tests.support.scripted.state import state

LONG = PROMPT * 14  # the first rounds draft across a page boundary


@pytest.mark.parametrize("width", range(2, 8))
def test_round_that_drafts_deeper_than_it_verifies_offers_the_verified_prefix(width):
    usual = scripted_rank(SCRIPT, Setup(slots=1))
    deep = GraphShape(
        kind=GraphKind.SPECULATIVE,
        batch_capacity=1,
        token_capacity=width,
        draft_tokens=7,
        verify_width=width,
    )
    manifest = msgspec.structs.replace(usual.manifest, shapes=(*usual.manifest.shapes, deep))
    model = usual.backend.model
    rank = RankExecutor(manifest, ModelParts(state(SCRIPT, 1), model.target, model.drafter))
    driver = Driver(rank)
    (request,) = driver.prefill([driver.open(LONG, 0, budget=90, sampling=SAMPLINGS[0])])
    twin = Twin(SCRIPT, SAMPLINGS[0], LONG)
    for _ in range(12):
        lane = LanePlan(0, request.epoch, 7)
        plan = RoundPlan(next(driver.round_ids), deep, lanes=(lane,), context_pages=4)
        (record,) = driver.submit(plan)
        request.tokens.extend(record.tokens)
        assert (record.drafted, record.offered, record.width) == (7, width - 1, width)
        assert record.accepted == twin.round(width - 1)
    assert request.tokens == twin.output

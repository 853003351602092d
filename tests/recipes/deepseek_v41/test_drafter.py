"""The drafter's block against the equations: logits, forecasts, and history (contract: R3, R7)."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.deepseek_v41.test_target import LOGITS_ATOL
from tests.recipes.parity.test_target import largest_error

LENGTHS = (1, 15, 16, 17, 24, 25, 97)
"""Around windows of 16 and 24."""
FORECAST_ATOL = 1e-5


def assert_equal(sink, wanted) -> None:
    assert [int(token) for token in sink.tokens] == wanted.tokens
    assert largest_error(torch.stack(sink.logits)[:, 0], wanted.logits) <= LOGITS_ATOL
    assert largest_error(torch.stack(sink.forecasts)[:, 0], wanted.confidence) <= FORECAST_ATOL


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("depth", [5, 7])
def test_block_after_a_prompt_equals_the_equations(tiny, length, depth):
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:length]])
    pending = tiny.tokens[length]
    wanted = tiny.reference.draft(tiny.oracle.features[:length], pending, depth)
    assert_equal(tiny.driver.propose([lane], [pending], depth), wanted)


@pytest.mark.parametrize("name", ["sparse", pytest.param("pooled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [5, 7])
@pytest.mark.parametrize("accepted", range(8))
def test_block_after_any_accepted_count_equals_the_equations(load_tiny, name, depth, accepted):
    """Rounds of wrong drafts leave no trace in windows, entries, pending rows and ids."""
    tiny = load_tiny(name)
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:13]])
    while lane.consumed < 28:
        at = lane.consumed
        sink = tiny.driver.propose([lane], [tiny.tokens[at]], depth)
        wanted = tiny.reference.draft(tiny.oracle.features[:at], tiny.tokens[at], depth)
        assert_equal(sink, wanted)
        taken = min(accepted, depth) + 1
        verified = tiny.driver.verify([lane], [tiny.row(at, depth + 1, taken)])
        got = verified.output.logits[0, :taken]
        assert largest_error(got, tiny.oracle.logits[at : at + taken]) <= LOGITS_ATOL
        tiny.driver.commit(verified, [taken])


def test_width_one_rounds_keep_the_windows_current(tiny):
    """After many rounds of one row a block drafts as if there had been no narrowing."""
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:9]])
    while lane.consumed < 45:
        tiny.driver.propose([lane], [tiny.tokens[lane.consumed]], 0)
        verified = tiny.driver.verify([lane], [[tiny.tokens[lane.consumed]]])
        tiny.driver.commit(verified, [1])
    wanted = tiny.reference.draft(tiny.oracle.features[:45], tiny.tokens[45], 7)
    assert_equal(tiny.driver.propose([lane], [tiny.tokens[45]], 7), wanted)


def test_forced_drafts_steer_the_transitions(tiny):
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:30]])
    forced = [9, 4, 77, 12, 3, 5, 60]
    wanted = tiny.reference.draft(tiny.oracle.features[:30], tiny.tokens[30], 7, forced)
    sink = tiny.driver.propose([lane], [tiny.tokens[30]], 7, forced=torch.tensor([forced]))
    assert_equal(sink, wanted)


def test_block_length_enters_what_every_place_sees(tiny):
    """Why a program of another length needs its own block: attention goes both ways."""
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:30]])
    short = tiny.driver.propose([lane], [tiny.tokens[30]], 5)
    long = tiny.driver.propose([lane], [tiny.tokens[30]], 7)
    assert largest_error(short.logits[0], long.logits[0]) > 100 * LOGITS_ATOL


def test_lanes_draft_alone(tiny):
    lanes = tiny.fresh(2)
    tiny.driver.prefill(lanes, [tiny.tokens[:31], tiny.tokens[:6]])
    both = tiny.driver.propose(lanes, [tiny.tokens[31], tiny.tokens[6]], 7, padded=2)
    for place, length in enumerate((31, 6)):
        wanted = tiny.reference.draft(tiny.oracle.features[:length], tiny.tokens[length], 7)
        got = torch.stack(both.logits)[:, place]
        assert largest_error(got, wanted.logits) <= LOGITS_ATOL

"""The drafter's rows, recursion and selection against transformers' modules."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.recipe_driver import PAGE


def test_first_draft_equals_the_teacher_forced_row_from_position_zero_on(tiny):
    """The first pair lies at position 0, right after a prefill of one token."""
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:1]])
    for at in range(1, 30):
        sink = driver.propose([lane], [tokens[at]], 1)
        assert largest_error(sink.logits[0][0], tiny.oracle.mtp_logits[at - 1]) <= LOGITS_ATOL
        verified = driver.verify([lane], [[tokens[at]]])
        driver.commit(verified, [1])


@pytest.mark.parametrize("chunk", [7, 40, 149])
def test_first_draft_equals_oracle_after_a_prefill_in_chunks(tiny, chunk):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    for at in range(0, 149, chunk):
        driver.prefill([lane], [tokens[at : min(at + chunk, 149)]])
    sink = driver.propose([lane], [tokens[149]], 1)
    assert largest_error(sink.logits[0][0], tiny.oracle.mtp_logits[148]) <= LOGITS_ATOL


def test_recursive_drafts_equal_oracle_to_depth_seven(tiny):
    """Lanes of different lengths draft greedily; the oracle is fed the same tokens."""
    driver, tokens = tiny.driver, tiny.tokens
    lengths = [1, 2, 4, 5, 40, 63, 64, 130]
    lanes = tiny.fresh(len(lengths))
    driver.prefill(lanes, [tokens[:length] for length in lengths])
    pending = [tokens[length] for length in lengths]
    sink = driver.propose(lanes, pending, 7, padded=1, columns=3)
    drafts = torch.stack(sink.tokens, dim=1)
    logits = torch.stack(sink.logits, dim=1)
    for i, length in enumerate(lengths):
        fed = [pending[i], *drafts[i, :6].tolist()]
        wanted = tiny.reference.draft(tiny.oracle, length, fed)
        assert largest_error(logits[i], wanted) <= LOGITS_ATOL


def test_proposing_twice_gives_the_same_drafts(tiny):
    """Draft rows of the first proposal must be out of the second one's sight."""
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:30]])
    wrong = torch.tensor([[9, 8, 7, 6, 5, 4, 3]])
    driver.propose([lane], [tokens[30]], 7, forced=wrong)
    sink = driver.propose([lane], [tokens[30]], 7)
    fed = [tokens[30], *(int(token) for token in sink.tokens[:6])]
    wanted = tiny.reference.draft(tiny.oracle, 30, fed)
    assert largest_error(torch.cat(sink.logits), wanted) <= LOGITS_ATOL


def test_drafter_selection_equals_the_oracle(hybrid, monkeypatch):
    driver, tokens, chosen = hybrid.driver, hybrid.tokens, []
    block_type = type(driver.drafter._attention)
    original = block_type.select
    number = driver.geometry.num_layers

    def select(self, *args):
        result = original(self, *args)
        if self is driver.drafter._attention:
            chosen.append(result[0, 0])
        return result

    monkeypatch.setattr(block_type, "select", select)
    [lane] = hybrid.fresh()
    driver.prefill([lane], [tokens[:135]])
    for at in range(135, 149):
        driver.propose([lane], [tokens[at]], 1, columns=3)
        row = chosen[-1]
        assert set(row[row >= 0].tolist()) == hybrid.oracle.selected[number][at - 1]
        verified = driver.verify([lane], [[tokens[at]]], columns=3)
        driver.commit(verified, [1])


def test_depth_zero_absorbs_the_pair_and_draws_nothing(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:18]])
    groups = driver.store.spec_groups
    [cached, *_] = [g for g in groups if g.family == "drafter" and g.shape[0] == PAGE]
    latent = driver.state[cached.name].flatten(2)
    assert latent[lane.pages[0], 17].isnan().all()
    sink = driver.propose([lane], [tokens[18]], 0)
    assert not sink.tokens
    assert latent[lane.pages[0], 17].isfinite().all()
    assert latent[lane.pages[0], 18].isnan().all()

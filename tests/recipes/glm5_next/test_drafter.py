"""The drafter's rows, recursion and selection against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from flare_ray.device.layers.indexed_mla import IndexedMlaBlock
from flare_ray.recipes.glm5_next import drafter as drafter_module
from flare_ray.recipes.glm5_next.weights import HEAD, drafter_embedding, drafter_head
from tests.recipes.glm5_next.test_target import LOGITS_ATOL, largest_error
from tests.support.glm_tiny import write_checkpoint
from tests.support.recipe_driver import RecipeDriver


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


def test_drafter_selection_equals_the_oracle(tiny, monkeypatch):
    driver, tokens, chosen = tiny.driver, tiny.tokens, []
    original = IndexedMlaBlock.select
    number = driver.geometry.num_layers

    def select(self, *args):
        result = original(self, *args)
        if self is driver.drafter._attention:
            chosen.append(result[0, 0])
        return result

    monkeypatch.setattr(IndexedMlaBlock, "select", select)
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:135]])
    for at in range(135, 149):
        driver.propose([lane], [tokens[at]], 1, columns=3)
        row = chosen[-1]
        assert set(row[row >= 0].tolist()) == tiny.oracle.selected[number][at - 1]
        verified = driver.verify([lane], [[tokens[at]]], columns=3)
        driver.commit(verified, [1])


def test_depth_zero_absorbs_the_pair_and_draws_nothing(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:18]])
    latent = driver.state[f"layers.{driver.geometry.num_layers}.latent"]
    assert latent[lane.pages[0], 17].isnan().all()
    sink = driver.propose([lane], [tokens[18]], 0)
    assert not sink.tokens
    assert latent[lane.pages[0], 17].isfinite().all()
    assert latent[lane.pages[0], 18].isnan().all()


def test_position_zero_embedding_is_zero(tiny):
    """The first row does not depend on its token; a later one does."""
    driver, tokens = tiny.driver, tiny.tokens
    rows = []
    for second in (tokens[1], tokens[1] + 1):
        [lane] = tiny.fresh()
        driver.prefill([lane], [tokens[:1]])
        rows.append(driver.propose([lane], [second], 1).logits[0])
    assert torch.equal(rows[0], rows[1])
    assert largest_error(rows[0][0], tiny.oracle.mtp_logits[0]) <= LOGITS_ATOL


def test_a_kept_embedding_at_position_zero_is_caught(tiny, monkeypatch):
    """Negative control: every later row sees the first, so the comparison must notice."""
    original = drafter_module.GlmDrafter._joined

    def joined(self, pairs):
        pairs.positions = pairs.positions + 1
        return original(self, pairs)

    monkeypatch.setattr(drafter_module.GlmDrafter, "_joined", joined)
    [lane] = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:12]])
    sink = tiny.driver.propose([lane], [tiny.tokens[12]], 1)
    assert largest_error(sink.logits[0][0], tiny.oracle.mtp_logits[11]) > LOGITS_ATOL


def test_own_embedding_and_head_win_where_a_checkpoint_has_them(load_tiny, tmp_path):
    tiny = load_tiny("flat")
    geometry, tokens = tiny.driver.geometry, tiny.tokens
    stored = load_file(tiny.folder / "model.safetensors")
    own = {
        drafter_embedding(geometry): torch.zeros(geometry.vocab_size, geometry.hidden),
        drafter_head(geometry): stored[HEAD].flip(0).contiguous(),
    }
    driver = RecipeDriver(write_checkpoint(tmp_path, "flat", extra=own), slots=1)
    lane = driver.open(0, [1, 2])
    driver.prefill([lane], [tokens[:9]])
    changed = driver.propose([lane], [tokens[9]], 1).logits[0][0]
    [lane] = tiny.fresh()
    tiny.driver.prefill([lane], [tokens[:9]])
    usual = tiny.driver.propose([lane], [tokens[9]], 1).logits[0][0]
    assert largest_error(changed, usual.flip(0)) > LOGITS_ATOL
    lane = driver.open(0, [1, 2])
    driver.prefill([lane], [tokens[:1]])
    at_zero = driver.propose([lane], [tokens[1]], 1).logits[0][0]
    assert largest_error(at_zero.flip(0), tiny.oracle.mtp_logits[0]) <= LOGITS_ATOL

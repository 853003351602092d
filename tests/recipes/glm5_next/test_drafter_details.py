"""What is this family's own about the drafter: position 0, and an embedding and head of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from flare_ray.recipes.glm5_next import drafter as drafter_module
from flare_ray.recipes.glm5_next.weights import HEAD, drafter_embedding, drafter_head
from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.glm_tiny import TEXTS, write_checkpoint
from tests.support.recipe_driver import RecipeDriver


@pytest.fixture(params=TEXTS)
def tiny(request, load_tiny):
    return load_tiny(request.param)


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

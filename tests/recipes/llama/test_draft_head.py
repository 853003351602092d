"""Drafts of a part of the vocabulary, under a head of its own; parity/ has the tied one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.llama.geometry import read_geometry
from flare_ray.recipes.llama.state import check_divisible
from tests.support.llama_tiny import TEXTS, write_checkpoint
from tests.support.recipe_driver import RecipeDriver

TEXT = list(range(20, 40))
NAME = "model.layers.2.shared_head.tokens"


def proposed(folder) -> torch.Tensor:
    """Logits [V] of the first draft behind TEXT."""
    driver = RecipeDriver(folder, slots=2)
    [lane] = driver.fresh(1, pages=1)
    driver.prefill([lane], [TEXT[:-1]])
    return driver.propose([lane], [TEXT[-1]], 1).logits[0][0]


def test_few_tokens_get_the_logits_they_have_among_all(tmp_path):
    everything = proposed(write_checkpoint(tmp_path / "all", "llama-scaled"))
    folder = write_checkpoint(tmp_path / "few", "llama-scaled", draft_vocab_size=48)
    found = proposed(folder)
    tokens = load_file(folder / "model.safetensors")[NAME]
    assert torch.allclose(found[tokens], everything[tokens], atol=1e-5)
    outside = torch.ones_like(found, dtype=torch.bool).index_fill_(0, tokens, False)
    assert (torch.softmax(found, 0)[outside] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("wrong", [[5, 5], [7, 3], [-1, 2], [0, 128]])
def test_tokens_that_are_no_ascending_ids_are_refused(tmp_path, wrong):
    folder = write_checkpoint(tmp_path, "llama-scaled", draft_vocab_size=2)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {NAME: torch.tensor(wrong)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{NAME} must hold ascending ids below 128"):
        proposed(folder)


def test_ranks_must_share_the_drafted_tokens_equally():
    geometry = read_geometry(TEXTS["llama-scaled"]() | {"draft_vocab_size": 47})
    check_divisible(geometry, 1)
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        check_divisible(geometry, 2)

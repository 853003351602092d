"""Engram constants of the released model, the token map, and history over widths."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.engram.api import NgramRows
from flare_ray.errors import CheckpointError
from flare_ray.recipes.deepseek_v41.engram import token_map
from flare_ray.recipes.deepseek_v41.geometry import read_geometry
from flare_ray.recipes.deepseek_v41.weights import tables
from tests.recipes.deepseek_v41.published import published_config
from tests.recipes.deepseek_v41.test_target import LOGITS_ATOL
from tests.recipes.parity.test_target import largest_error
from tests.support.deepseek_tiny import compressed, write_checkpoint, write_tokenizer
from tests.support.recipe_driver import RecipeDriver

GEOMETRY = read_geometry(published_config())
# Constants of two public ports of the released model, and rows computed from them.
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
PAD = 2
IDS = (5, 70000, 123, 5, 99091, 42)
LAYER_1_FIRST = [13131409, 22107638, 46286683, 48259159, 69021570, 87090089]
LAYER_14_LAST = [300295865, 311421472, 327186392, 343785111, 357781751, 382159634]
TOKEN_0_FIRST = [5412672, 18319159, 35492627]


def look_back(ids: tuple[int, ...]) -> torch.Tensor:
    padded = (PAD,) * 3 + ids
    return torch.tensor([[padded[at + 3 - s] for s in range(4)] for at in range(len(ids))])


def test_buckets_and_multipliers_are_the_released_ones():
    first, second = tables(GEOMETRY)
    assert (first.multipliers, second.multipliers) == MULTIPLIERS
    assert (first.rows, second.rows) == GEOMETRY.engram.rows
    assert first.primes[:3] == (16000057, 16000079, 16000081)
    assert second.primes[-1] == 16000889
    assert len({*first.primes, *second.primes}) == 48


def test_rows_of_known_ids_are_the_released_ones():
    rows = NgramRows(tables(GEOMETRY), device=torch.device("cpu"))(look_back(IDS))
    assert rows[0, 5, :6].tolist() == LAYER_1_FIRST
    assert rows[1, 5, -6:].tolist() == LAYER_14_LAST
    assert rows[0, 0, :3].tolist() == TOKEN_0_FIRST


def test_map_joins_tokens_that_normalise_alike(tmp_path):
    write_tokenizer(tmp_path, 60)
    mapped, count = token_map(tmp_path, 60)
    assert list(mapped) == compressed(60) and count == max(mapped) + 1


def test_ids_without_a_token_count_as_the_first(tmp_path):
    write_tokenizer(tmp_path, 20)
    mapped, count = token_map(tmp_path, 23)
    assert mapped[20:] == (0, 0, 0) and count == max(compressed(20)) + 1


def test_another_tokenizer_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "other", "sparse")
    write_tokenizer(folder, 100)
    with pytest.raises(CheckpointError, match="engram_compressed_vocab_size"):
        RecipeDriver(folder)
    (folder / "tokenizer.json").unlink()
    token_map.cache_clear()
    with pytest.raises(CheckpointError, match=r"tokenizer.json does not exist"):
        RecipeDriver(folder)


def test_rejected_tokens_leave_the_ids_of_a_sequence_alone(tiny):
    """Junk of other ids in every round, up to the widest, then a width-one round."""
    (lane,) = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:2]])
    for emitted in (1, 1, 2, 1, 3, 1):
        at = lane.consumed
        verified = tiny.driver.verify([lane], [tiny.row(at, 8, emitted)])
        tiny.driver.commit(verified, [emitted])
    at = lane.consumed
    verified = tiny.driver.verify([lane], [[tiny.tokens[at]]])
    assert largest_error(verified.output.logits[0], tiny.oracle.logits[at : at + 1]) <= LOGITS_ATOL

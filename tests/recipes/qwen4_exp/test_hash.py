"""The n-gram hash: published constants and rows, resets, and what a checkpoint stores of them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_ray.device.ops.ngram_hash.api import NgramHash
from flare_ray.device.parallel.groups import run_ranks
from flare_ray.errors import CheckpointError
from flare_ray.recipes.qwen4_exp.geometry import read_geometry
from flare_ray.recipes.qwen4_exp.ngram import primes_from
from tests.recipes.qwen4_exp.published import published_config
from tests.support.qwen_tiny import config_of
from tests.support.recipe_driver import RecipeDriver

RESET = 248044
CONSTANTS = read_geometry(published_config()).ngram.hashes[1]
PUBLISHED_ROWS = {
    (100, 200, 300): [
        *(6129193, 20484628, 57667260, 77728366, 86357215, 109234597, 123551585, 149309416),
        *(172664702, 184433127, 201501905, 227445817, 243341740, 279238932, 284538191, 311036336),
    ],
    (RESET, RESET, 100): [5727835, 305180972],
    (100, RESET, 300): [4401500, 310576508],
}
"""History of three tokens -> rows; where two are listed, the first and the last."""


def published_hash() -> NgramHash:
    parts = (CONSTANTS.multipliers, CONSTANTS.primes, CONSTANTS.offsets)
    return NgramHash(*map(torch.tensor, parts), reset=RESET)


def rows_of(tokens: list[int], first: int = 5) -> torch.Tensor:
    """Rows [len - 2, 16] of all but the first two tokens, which are history at `first`."""
    positions = torch.arange(first, first + len(tokens) - 2).unsqueeze(0)
    return published_hash().rows(torch.tensor([tokens]), positions)[0]


def test_published_constants_follow_from_the_config():
    assert CONSTANTS.multipliers == (23703573157769, 20109073645365, 8052911324071)
    last_digits = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    assert CONSTANTS.primes == tuple(20_000_000 + digits for digits in last_digits)
    assert CONSTANTS.rows == 320_001_446
    assert read_geometry(published_config()).ngram.padded_rows == {1: 320_001_536}


@pytest.mark.parametrize("history", PUBLISHED_ROWS, ids=str)
def test_rows_are_the_published_ones(history):
    rows, wanted = rows_of(list(history))[0].tolist(), PUBLISHED_ROWS[history]
    assert (rows if len(wanted) > 2 else [rows[0], rows[-1]]) == wanted


def test_the_start_of_a_text_is_a_reset_whatever_the_history_holds():
    assert torch.equal(rows_of([7, 9, 100], first=0), rows_of([RESET, RESET, 100]))
    assert torch.equal(rows_of([7, 9, 100], first=1), rows_of([RESET, 9, 100]))
    assert torch.equal(rows_of([7, RESET, 100]), rows_of([RESET, RESET, 100]))
    assert not torch.equal(rows_of([7, 9, 100]), rows_of([RESET, 9, 100]))


def test_a_later_layer_continues_the_primes_and_shifts_the_seed():
    geometry = read_geometry(config_of("qwen-single"))
    first, second = geometry.ngram.hashes.values()
    assert first.primes + second.primes == primes_from(61, 12)
    assert first.multipliers != second.multipliers
    assert second.offsets[0] == 0


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_offsets"])
def test_stored_constants_of_another_config_are_refused(tiny_folder, tmp_path, name):
    folder = tiny_folder("qwen-fused")
    tensors = load_file(folder / "model.safetensors")
    [stored] = [key for key in tensors if key.endswith(name)]
    tensors[stored] = tensors[stored] + 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"{name} holds .*config.json asks for"):
        RecipeDriver(tmp_path, slots=1)


def test_constants_stored_as_floats_are_refused_before_loading(tiny_folder, tmp_path):
    folder = tiny_folder("qwen-fused")
    tensors = load_file(folder / "model.safetensors")
    [stored] = [key for key in tensors if key.endswith("layer_multipliers")]
    tensors[stored] = tensors[stored].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        RecipeDriver(tmp_path, slots=1)
    assert any("type F32, expected I64" in line for line in caught.value.problems)


@pytest.mark.parametrize("size", [2, 4])
def test_a_divided_table_gives_every_rank_the_same_rows(tiny_folder, size):
    folder = tiny_folder("qwen-fused")
    rows = torch.randint(0, 800, (9, 8), generator=torch.Generator().manual_seed(1))

    def gather(comm):
        driver = RecipeDriver(folder, comm, slots=1, num_pages=2)
        [memory] = [layer.ngram for layer in driver.target._layers if layer.ngram]
        return memory._table.gather(rows)

    [whole] = run_ranks(1, gather)
    assert whole.shape == (9, 8, 6)
    for part in run_ranks(size, gather):
        assert torch.equal(part, whole)


def test_the_tiny_tables_heads_reach_beyond_one_shard(tiny_folder):
    """Else a table read in the wrong order of shards would pass."""
    config = json.loads((tiny_folder("qwen-fused") / "config.json").read_text())
    ngram = read_geometry(config).ngram
    assert ngram.padded_rows[1] // ngram.shards < ngram.hashes[1].offsets[-3]

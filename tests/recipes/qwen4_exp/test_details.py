"""What is this family's own: resets in rejected drafts, both spellings of experts, shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_ray.errors import CheckpointError
from flare_ray.recipes.declaration import resolve
from flare_ray.recipes.qwen4_exp import geometry as geometry_module
from flare_ray.recipes.qwen4_exp.recipe import RECIPE
from flare_ray.recipes.qwen4_exp.state import RECORDS
from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.qwen_tiny import EOS, TEXTS
from tests.support.recipe_driver import RecipeDriver


@pytest.fixture(params=["qwen-fused", "qwen-single"])
def tiny(request, load_tiny):
    return load_tiny(request.param)


@pytest.mark.parametrize("emitted", [1, 2, 4])
def test_a_rejected_draft_that_resets_hashing_resets_nothing(tiny, emitted):
    """The rejected rows are all EOS; the committed branch goes on as if they had never been."""
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:40]])
    for _ in range(4):
        at = lane.consumed
        row = tokens[at : at + emitted] + [EOS] * (8 - emitted)
        verified = driver.verify([lane], [row])
        wanted = tiny.oracle.logits[at : at + emitted]
        assert largest_error(verified.output.logits[0, :emitted], wanted) <= LOGITS_ATOL
        driver.commit(verified, [emitted])


def test_hashing_that_resets_on_another_token_is_caught(tiny):
    """Negative control: the sequence holds the reset token alone and in runs."""
    driver = RecipeDriver(tiny.folder, slots=1)
    for layer in driver.target._layers:
        if layer.ngram is not None:
            layer.ngram._hash._reset = 2
    logits = driver.prefill([driver.open(0, [1])], [tiny.tokens[:60]])[0]
    assert largest_error(logits[30:], tiny.oracle.logits[30:60]) > LOGITS_ATOL


def test_experts_in_one_tensor_or_matrix_by_matrix_are_the_same_model(tiny, tmp_path):
    """The variant's checkpoint written in the other spelling gives the same bits."""
    tensors = load_file(tiny.folder / "model.safetensors")
    experts = TEXTS[tiny.name]()["num_experts"]
    other = _separated(tensors) if tiny.name == "qwen-fused" else _joined(tensors, experts)
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    driver = RecipeDriver(tmp_path, slots=1)
    got = driver.prefill([driver.open(0, [1])], [tiny.tokens[:20]])[0]
    [lane] = tiny.fresh()
    assert torch.equal(got, tiny.driver.prefill([lane], [tiny.tokens[:20]])[0])


def test_both_spellings_at_once_are_refused_by_name(load_tiny, tmp_path):
    tiny = load_tiny("qwen-fused")
    tensors = load_file(tiny.folder / "model.safetensors")
    one = "mtp.layers.0.mlp.experts.3.down_proj.weight"
    tensors[one] = _separated(tensors)[one].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        RecipeDriver(tmp_path, slots=1)
    assert any(one in line and "keep one of the two" in line for line in caught.value.problems)


def test_a_layer_without_experts_names_the_matrices_it_lacks(load_tiny, tmp_path):
    tiny = load_tiny("qwen-fused")
    tensors = load_file(tiny.folder / "model.safetensors")
    del tensors["mtp.layers.0.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        RecipeDriver(tmp_path, slots=1)
    assert len(caught.value.problems) == TEXTS["qwen-fused"]()["num_experts"]
    assert all("down_proj.weight: missing" in line for line in caught.value.problems)


@pytest.fixture
def in_columns(tiny, monkeypatch):
    """The same checkpoint with a saved state per row."""
    read = geometry_module.read_geometry
    monkeypatch.setattr(
        geometry_module,
        "read_geometry",
        lambda config: replace(read(config), recurrence="columns"),
    )
    return replace(tiny, driver=RecipeDriver(tiny.folder, slots=8))


def test_records_give_the_bits_of_saved_columns(tiny, in_columns):
    """Prefills, rounds of every width and accepted count, wrong drafts, several lanes."""
    heard = []
    for variant in (tiny, in_columns):
        driver, lanes, logits = variant.driver, variant.fresh(2), []
        logits += driver.prefill(lanes, [tiny.tokens[:21], tiny.tokens[:5]])
        for turn in range(14):
            width = (8, 1, 1, 8, 3, 1, 5)[turn % 7]
            emitted = [turn % width + 1, (turn * 5 + 3) % width + 1]
            rows = [
                tiny.tokens[lane.consumed : lane.consumed + count] + [7] * (width - count)
                for lane, count in zip(lanes, emitted, strict=True)
            ]
            verified = driver.verify(lanes, rows, padded=1, columns=3)
            logits.append(verified.output.logits[:2].clone())
            driver.commit(verified, emitted)
        chunks = [tiny.tokens[lane.consumed : lane.consumed + 9] for lane in lanes]
        heard.append([*logits, *driver.prefill(lanes, chunks)])
    kinds = [{g.kind for g in v.driver.store.spec_groups} for v in (tiny, in_columns)]
    assert "column" not in kinds[0] and "column" in kinds[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*heard, strict=True))


def test_each_rank_holds_its_share_of_state(load_tiny):
    geometry = load_tiny("qwen-fused").driver.geometry
    whole = {g.name: g for g in resolve(RECIPE.state)(geometry, 1).groups}
    for group in resolve(RECIPE.state)(geometry, 4).groups:
        one, purpose = whole[group.name], group.name.rpartition(".")[2]
        if purpose in ("recurrent", "window", *RECORDS):
            assert group.shape == (one.shape[0] // 4, *one.shape[1:]) and group.sharded
        elif purpose in ("keys", "values"):
            # two key heads on four ranks: each is kept twice
            assert group.shape == (one.shape[0], one.shape[1] // 2, one.shape[2]) and group.sharded
        else:
            assert group.shape == one.shape and not group.sharded


def _separated(tensors):
    result = {}
    for name, value in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(value):
                for part, rows in zip(("gate", "up"), both.chunk(2), strict=True):
                    result[f"{stem}{expert}.{part}_proj.weight"] = rows.contiguous()
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for expert, matrix in enumerate(value):
                result[f"{stem}{expert}.down_proj.weight"] = matrix.contiguous()
        else:
            result[name] = value
    return result


def _joined(tensors, experts):
    result = {n: v for n, v in tensors.items() if ".experts." not in n}
    stems = {n.partition(".experts.")[0] for n in tensors if ".experts." in n}
    for stem in stems:
        parts = {
            part: [tensors[f"{stem}.experts.{e}.{part}_proj.weight"] for e in range(experts)]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        result[f"{stem}.experts.gate_up_proj"] = torch.stack(both)
        result[f"{stem}.experts.down_proj"] = torch.stack(parts["down"])
    return result

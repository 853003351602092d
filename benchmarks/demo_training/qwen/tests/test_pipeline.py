"""What the harness does with this family: roles of tokens, stored forms, scorers, generation."""

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks.demo_training.assemble import MAX_BYTES, assemble
from benchmarks.demo_training.family import FAMILIES, family_of
from benchmarks.demo_training.generation import Generation
from benchmarks.demo_training.heldout import answer_mask
from benchmarks.demo_training.index_phase import scorer_loss
from benchmarks.demo_training.phases import Run, token_weights, trunk_optimizers
from benchmarks.demo_training.qwen.family import QWEN, THINK
from benchmarks.demo_training.qwen.model import QwenModel
from benchmarks.demo_training.qwen.published import from_published, to_published
from benchmarks.demo_training.qwen.shape import END_OF_TEXT, END_OF_TURN, TURN, text_config
from benchmarks.demo_training.qwen.storage import stored_format
from benchmarks.demo_training.speculative import Sampling
from benchmarks.demo_training.storage import round_in_place
from benchmarks.demo_training.train import export
from flare_ray.config import EngineConfig
from flare_ray.device.prepare import make_plan
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.manifest import open_validated
from flare_ray.device.weights.quantiser import dequantise_tensors, quantise_tensors
from flare_ray.recipes.declaration import resolve


def test_families_are_found_by_name_and_others_refused():
    assert all(family_of(name).name == name for name in FAMILIES)
    with pytest.raises(ValueError, match=r"other.*glm, qwen"):
        family_of("other")


def test_weights_are_full_in_answers_and_raw_text_alone():
    text = 60
    row = [text, END_OF_TEXT, TURN, text, END_OF_TURN, text, TURN, text, THINK, text, END_OF_TURN]
    ids = torch.tensor([[*row, END_OF_TEXT, text]])
    weights = token_weights(ids, QWEN.ids, 0.25)[0].tolist()
    assert weights == [1, 1] + [0.25] * 6 + [1, 1] + [0.25] + [1, 1]
    mask = answer_mask(ids, "chat", QWEN.ids)[0].tolist()
    assert mask == [0] * 8 + [1, 1, 0, 0]


def test_rounding_the_model_gives_what_the_checkpoint_reads_back(model):
    published = to_published(model)
    other = from_published(QwenModel(text_config()), published)
    round_in_place(other, [name for name, _ in other.named_parameters()], stored_format)
    back = dequantise_tensors(quantise_tensors(published, stored_format), torch.bfloat16)
    for name, value in to_published(other).items():
        assert torch.equal(value.float(), back[name].float()), name


def test_assembled_folder_is_small_and_what_the_recipe_lists(model, tmp_path):
    run, pack, folder = (tmp_path / name for name in ("run", "pack", "checkpoint"))
    run.mkdir()
    pack.mkdir()
    (pack / "tokenizer.json").write_text("{}")
    export(model, run, QWEN)
    assemble(run, pack, folder, QWEN)
    config = EngineConfig(checkpoint=str(folder), device="cpu", dtype="float32", context_tokens=256)
    plan = make_plan(config)
    _, validated = open_validated(folder, resolve(plan.recipe.manifest)(plan.geometry))
    formats = validated.formats()
    assert formats[WeightFormat.NVFP4_MODELOPT] == 7 * 8 * 3
    assert formats[WeightFormat.FP8_BLOCK] == 4 * 3 + 3 * 4 + 7 * 3
    assert (folder / "model.safetensors").stat().st_size < MAX_BYTES


def test_scorer_learns_where_attention_looks(model):
    ids = torch.randint(32, 8192, (1, 256), generator=torch.Generator().manual_seed(8))
    other = from_published(QwenModel(text_config()), to_published(model))
    layer, found = other.attentions()[0], []
    hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
    other.hidden(ids)
    hook.remove()
    x, at = found[0].unflatten(0, (1, -1)), torch.arange(128, 256, 4)
    optimizer = torch.optim.AdamW(layer.indexer.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        loss, kept = scorer_loss(layer, x, at, 8)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert 0 < kept <= 1
    assert layer.q_proj.weight.grad is None


def test_every_trained_parameter_is_in_one_group_of_its_kind(model):
    settings = SimpleNamespace(learning_rate=1e-3)
    run = SimpleNamespace(model=model, family=QWEN, settings=settings, device=torch.device("cpu"))
    adam, muon = trunk_optimizers(cast(Run, run))
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [[names[id(p)] for p in g["params"]] for g in (*adam.param_groups, *muon.param_groups)]
    everything = [n for group in groups for n in group]
    assert sorted(everything) == sorted(n for n in names.values() if ".indexer." not in n)
    _, slow, rest, hidden = groups
    assert len(slow) == 2 * (2 * 7) + 2
    assert any("ngram_embedding" in n for n in rest) and not any("norm" in n for n in hidden)
    assert any("fc_embedding" in n for n in hidden)


def test_greedy_text_is_the_same_at_every_draft_depth(model):
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(32, 8192, (n,), generator=generator).tolist() for n in (9, 23)]
    texts = []
    for depth in (1, 5):
        sampling = Sampling(0.0, 1.0, depth, 12, frozenset())
        make = partial(QWEN.session, model)
        texts.append([t[:12] for t in Generation(make, prompts, [12] * 2, sampling).run().tokens])
    assert texts[0] == texts[1]
    for prompt, text in zip(prompts, texts[0], strict=True):
        logits = model.logits(model.hidden(torch.tensor([prompt + text])))
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == text

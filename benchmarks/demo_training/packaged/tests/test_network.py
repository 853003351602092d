"""The training network against the recipe, and its parts against plain forms."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks.demo_training.generation import Generation
from benchmarks.demo_training.packaged.batched import PackagedSession
from benchmarks.demo_training.packaged.loss import CHUNK, OVERLAP, SOFT, Aim, DraftLoss
from benchmarks.demo_training.packaged.model import load_drafter, load_target
from benchmarks.demo_training.speculative import Sampling
from tests.support.llama_tiny import UNDRAFTED, write_checkpoint
from tests.support.recipe_driver import RecipeDriver

DEPTH, GIVEN = 5, 20
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The recipe's driver and the training model over the same random weights."""
    whole = write_checkpoint(tmp_path_factory.mktemp("whole"), "llama-odd")
    alone = tmp_path_factory.mktemp("alone")
    write_checkpoint(alone, "llama-odd", **UNDRAFTED, head_dim=8)
    model = load_target(alone, CPU, torch.float32)
    stored = load_file(whole / "model.safetensors")
    load_drafter(model, {n: t for n, t in stored.items() if n.startswith("model.layers.3.")})
    return RecipeDriver(whole, slots=2), model


@torch.no_grad()
def test_unrolled_drafts_equal_the_recipes(pair):
    driver, model = pair
    source = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 150, (GIVEN,), generator=source).tolist()
    drafts = torch.randint(3, 150, (1, DEPTH), generator=source)
    [lane] = driver.fresh(1, pages=1)
    driver.prefill([lane], [tokens[:-1]])
    wanted = torch.cat(driver.propose([lane], [tokens[-1]], DEPTH, forced=drafts).logits)

    ids = torch.tensor([tokens + drafts[0].tolist()])
    hidden, length = model.hidden(ids[:, :-1]), ids.shape[1] - 1
    turns = model.turns(torch.arange(length)[None])
    outs = model.drafter.unroll(model.embed_tokens(ids[:, 1:]), hidden, turns, DEPTH)
    rows = torch.stack([out[0, GIVEN - 2 + k] for k, out in enumerate(outs)])
    assert torch.allclose(model.draft_logits(rows), wanted, atol=1e-4)


@torch.no_grad()
def test_batched_rows_equal_whole_passes(pair):
    _, model = pair
    ids = torch.randint(3, 150, (3, 24), generator=torch.Generator().manual_seed(9))
    whole = model.hidden(ids)
    session = PackagedSession(model, 3, 32)
    lengths = torch.tensor([4, 7, 9])
    session.verify(ids[:, :12])
    session.commit(lengths)
    following = torch.stack([row[n : n + 5] for row, n in zip(ids, lengths, strict=True)])
    found = session.verify(following)
    for row, n in enumerate(lengths.tolist()):
        assert torch.allclose(found[row], whole[row, n : n + 5], atol=1e-4)


def test_speculative_answers_are_the_targets_own(pair):
    _, model = pair
    prompts = [[5, 9, 30, 41], [7, 8, 9, 10, 11, 12]]
    make = partial(PackagedSession, model)
    sampling = Sampling(0.0, 1.0, 3, 12, frozenset())
    answers = Generation(make, prompts, [12, 12], sampling).run()
    for prompt, answer in zip(prompts, answers.tokens, strict=True):
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0, -1]).argmax()))
        assert answer[:12] == ids[len(prompt) :]


def test_loss_and_gradient_equal_the_plain_ones(monkeypatch):
    monkeypatch.setattr("benchmarks.demo_training.packaged.loss.CHUNK", 5)
    assert CHUNK > 5
    source = torch.Generator().manual_seed(2)
    outs = torch.randn(2, 12, 8, generator=source, dtype=torch.float64).requires_grad_()
    states, head = torch.randn(12, 8, generator=source), torch.randn(30, 8, generator=source)
    tokens, weights = torch.arange(0, 30, 3), torch.tensor([1.0, 0.5])
    aim = Aim(states, head, tokens, weights)
    loss, overlap = DraftLoss.apply(outs, aim)
    [found] = torch.autograd.grad(loss, outs)

    p = torch.softmax(F.linear(states, head), -1)[:, tokens]
    log_q = torch.log_softmax(F.linear(outs, head[tokens].double()), -1)
    met = torch.minimum(p, log_q.exp()).sum(-1)
    rows = -SOFT * (p * log_q).sum(-1) + OVERLAP * (1 - met)
    expected = (rows.mean(1) * weights).sum()
    [wanted] = torch.autograd.grad(expected, outs)
    assert torch.allclose(overlap.double(), met.mean(1), atol=1e-5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5) and found.abs().max() > 1e-3

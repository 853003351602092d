"""The training model against transformers, the serving recipe and its own recursive form."""

import pytest
import torch

from benchmarks.demo_training.network import layers as shared_layers
from benchmarks.demo_training.qwen import layers as layers_module
from benchmarks.demo_training.qwen.batched import QwenSession
from benchmarks.demo_training.qwen.model import QwenModel
from benchmarks.demo_training.qwen.published import from_published, is_drafter, to_published
from benchmarks.demo_training.qwen.shape import END_OF_TEXT, text_config
from tests.support.qwen_oracle import TransformersQwen
from tests.support.recipe_driver import RecipeDriver

MAX_DIFFERENCE = 1e-4
LENGTH = 75
DEPTH = 5


def random_ids(seed, *shape):
    """Token ids with the end of a text among them, alone and twice."""
    ids = torch.randint(32, 8192, shape, generator=torch.Generator().manual_seed(seed))
    ids[..., [9, 24, 25]] = END_OF_TEXT
    return ids


@torch.no_grad()
@pytest.mark.slow
def test_logits_streams_and_drafts_equal_transformers_and_the_recipe(pair):
    model, folder = pair
    ids = random_ids(1, LENGTH)
    oracle = TransformersQwen(folder).run(ids)
    assert oracle.gap > 1e-6  # no choice hangs on rounding
    hidden = model.hidden(ids[None])
    logits = model.logits(hidden)[0]
    assert (hidden[0] - oracle.feedback).abs().max() < MAX_DIFFERENCE
    assert (logits - oracle.logits).abs().max() < MAX_DIFFERENCE
    out = model.mtp(model.embed_tokens(ids[None, 1:]), hidden[:, :-1], torch.float32)
    assert (model.draft_logits(out)[0] - oracle.mtp_logits).abs().max() < MAX_DIFFERENCE
    driver = RecipeDriver(folder, slots=4)
    driver.poison()
    lane, tokens = driver.open(1, [3, 5]), ids.tolist()
    served = torch.cat([driver.prefill([lane], [tokens[:40]])[0]])
    assert (served - logits[:40]).abs().max() < MAX_DIFFERENCE
    served = driver.prefill([lane], [tokens[40:]])[0]
    assert (served - logits[40:]).abs().max() < MAX_DIFFERENCE


@torch.no_grad()
def test_unrolled_drafts_equal_recursive_ones(model):
    ids, start = random_ids(2, 2, LENGTH), 60
    hidden = model.hidden(ids)
    embedded = model.embed_tokens(ids[:, 1:])
    outs = model.mtp.unroll(embedded, hidden[:, :-1], torch.float32, DEPTH)
    session = QwenSession(model, 2, 96)
    begin = torch.zeros(2, dtype=torch.int64)
    session.bound = LENGTH
    state = session.draft(ids[:, 1 : start + 2], hidden[:, : start + 1], begin)[:, -1:]
    for step in range(DEPTH):
        at = start + step
        assert (outs[step][:, at] - state[:, 0]).abs().max() < MAX_DIFFERENCE
        state = session.draft(ids[:, at + 2 : at + 3], state, begin + at + 1)


@torch.no_grad()
def test_decoding_in_parts_equals_the_parallel_model_and_rejected_rows_leave_no_trace(pair):
    model, _ = pair
    ids, wrong = random_ids(3, 2, 60), random_ids(4, 2, 40)
    want = model.hidden(ids)
    budget = model.attentions()[0].budget
    session = QwenSession(model, 2, 96, budget and budget * model.pool)
    at, turn = [0, 0], 0
    while min(at) < 52:
        kept = [(turn + r) % 8 + 1 if at[r] < 52 else 0 for r in range(2)]
        rows = torch.stack(
            [torch.cat([ids[r, at[r] : at[r] + kept[r]], wrong[r, kept[r] : 8]]) for r in range(2)]
        )
        got = session.verify(rows)
        for r in range(2):
            part = want[r, at[r] : at[r] + kept[r]]
            assert kept[r] == 0 or (got[r, : kept[r]] - part).abs().max() < MAX_DIFFERENCE
        session.commit(torch.tensor(kept))
        at, turn = [a + k for a, k in zip(at, kept, strict=True)], turn + 3
    session.select(torch.tensor([1]))
    got = session.verify(ids[1:, at[1] :])
    assert (got - want[1:, at[1] :]).abs().max() < MAX_DIFFERENCE


@torch.no_grad()
def test_segmented_rows_equal_whole_rows(model, monkeypatch):
    ids = random_ids(5, 2, 256)
    whole = model.hidden(ids)
    monkeypatch.setattr(layers_module, "SEGMENT", 64)
    assert shared_layers.SEGMENT != 64
    assert (model.hidden(ids) - whole).abs().max() < MAX_DIFFERENCE


def test_published_tensors_survive_a_round_trip_and_tell_their_part(model):
    tensors = to_published(model)
    again = to_published(from_published(QwenModel(text_config()), tensors))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[k], again[k]) for k in tensors)
    drafter = sum(t.numel() for n, t in tensors.items() if is_drafter(model, n))
    assert drafter == sum(p.numel() for p in model.mtp.parameters())


def test_other_hash_constants_are_refused_by_name(model):
    tensors = to_published(model)
    name = next(n for n in tensors if n.endswith("layer_multipliers"))
    tensors[name] = tensors[name] + 2
    with pytest.raises(ValueError, match="layer_multipliers"):
        from_published(QwenModel(text_config()), tensors)


def test_every_parameter_but_the_index_gets_a_gradient(model):
    ids = random_ids(6, 2, 40)
    other = from_published(QwenModel(text_config()), to_published(model))
    hidden = other.hidden(ids[:, :-2])
    drafted = other.mtp(other.embed_tokens(ids[:, 1:-1]), hidden, torch.float32)
    loss = other.logits(hidden).square().mean() + other.draft_logits(drafted).square().mean()
    (loss + sum(moe.unbalanced for moe in other.moes())).backward()
    for name, parameter in other.named_parameters():
        assert (parameter.grad is None) == (".indexer." in name), name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, name

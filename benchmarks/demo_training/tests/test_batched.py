"""Batched decoding and generation against the one-request reference, on seeded random weights."""

from functools import partial

import pytest
import torch

from benchmarks.demo_training.batched import BatchedSession
from benchmarks.demo_training.generation import Generation, continued
from benchmarks.demo_training.shape import STOP_IDS
from benchmarks.demo_training.speculative import Sampling, generate

MAX_DIFFERENCE = 1e-4
BUDGET = 16


def random_ids(seed, *shape):
    return torch.randint(48, 8192, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_decoding_in_parts_equals_the_parallel_model(pair, budget):
    model, _ = pair
    ids = random_ids(1, 2, 59)
    model.set_budget(budget)
    want = model.hidden(ids)
    model.set_budget(None)
    session, got = BatchedSession(model, 2, 96, budget), []
    for part in ids.split((8, 1, 5, 15, 30), 1):
        for rows in part.split(8, 1):
            got.append(session.verify(rows))
            session.commit(torch.full((2,), rows.shape[1]))
    assert (torch.cat(got, 1) - want).abs().max() < MAX_DIFFERENCE


@torch.no_grad()
def test_rejected_rows_leave_no_trace(pair):
    model, _ = pair
    ids, wrong = random_ids(2, 2, 40), random_ids(3, 2, 8)
    session = BatchedSession(model, 2, 64, BUDGET)
    for part in ids[:, :32].split(8, 1):
        session.verify(part)
        session.commit(torch.full((2,), 8))
    session.verify(torch.cat([ids[:, 32:35], wrong[:, :5]], 1))
    session.commit(torch.tensor([3, 0]))
    session.verify(torch.cat([wrong[:1], ids[1:, 32:]]))
    session.commit(torch.tensor([0, 8]))
    got = session.verify(torch.cat([ids[:1, 35:], wrong[1:, :5]]))[0]
    model.set_budget(BUDGET)
    want = model.hidden(ids)[0, 35:]
    model.set_budget(None)
    assert (got - want).abs().max() < MAX_DIFFERENCE


def test_batched_greedy_answers_and_rounds_equal_single_ones(pair):
    model, reference = pair
    prompts = [random_ids(seed, 9 + 5 * seed).tolist() for seed in range(3)]
    sampling = Sampling(0.0, 1.0, 4, 12, frozenset(STOP_IDS))
    answers = Generation(partial(BatchedSession, model), prompts, [12] * 3, sampling).run()
    for i, prompt in enumerate(prompts):
        want = generate(reference, prompt, sampling, torch.Generator())
        assert answers.tokens[i] == want.tokens
        assert answers.rounds[i] == len(want.rounds)
        assert answers.emitted[i] == sum(r[2] for r in want.rounds)


def test_trunk_text_keeps_its_prefix_and_is_greedy_where_asked(pair):
    model, reference = pair
    prompt = random_ids(5, 1, 21)
    sampling = Sampling(0.0, 1.0, 1, 8, frozenset())
    rows = continued(partial(BatchedSession, model), prompt, 29, sampling)
    want = generate(reference, prompt[0].tolist(), sampling, torch.Generator())
    assert torch.equal(rows[:, :21], prompt)
    assert rows[0, 21:].tolist() == want.tokens[:8]

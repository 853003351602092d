"""Penalties, rules and bans of every verified row against a loop over its prefix (contract: K3)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from flare_ray.device.sampling.penalties import (
    IN_PROMPT,
    Penalties,
    apply_rules,
    ban_words,
    penalise,
)

LANES, WIDTH, VOCABULARY = 3, 5, 12
ROUNDING = 1e-6  # float32 against the same few operations in another order


def penalties(repetition, presence, frequency) -> Penalties:
    return Penalties(*(torch.tensor(v) for v in (repetition, presence, frequency)))


@pytest.mark.parametrize("seed", range(8))
def test_every_row_sees_committed_counts_and_the_drafts_before_it(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(LANES, WIDTH, VOCABULARY, generator=generator)
    drafts = torch.randint(0, 4, (LANES, WIDTH - 1), generator=generator)  # many repeats
    prompt = torch.rand(LANES, VOCABULARY, generator=generator) < 0.3
    output = torch.randint(0, 3, (LANES, VOCABULARY), generator=generator, dtype=torch.int32)
    law = ([1.0, 1.3, 0.7], [0.0, 0.5, -0.4], [0.0, 0.2, 0.9])
    counts = output + prompt.to(torch.int32) * IN_PROMPT
    found = penalise(logits.clone(), counts, drafts, penalties(*law))
    for lane in range(LANES):
        repetition, presence, frequency = (values[lane] for values in law)
        for row in range(WIDTH):
            seen = Counter(drafts[lane, :row].tolist())
            for token in range(VOCABULARY):
                value = float(logits[lane, row, token])
                count = int(output[lane, token]) + seen[token]
                if count or prompt[lane, token]:
                    value = value / repetition if value > 0 else value * repetition
                value -= count * frequency + (count > 0) * presence
                assert abs(float(found[lane, row, token]) - value) < ROUNDING


def test_neutral_penalties_change_no_bit():
    logits = torch.randn(2, 3, VOCABULARY)
    counts = torch.randint(0, 5, (2, VOCABULARY), dtype=torch.int32) | IN_PROMPT
    neutral = penalties([1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    assert torch.equal(penalise(logits, counts, torch.tensor([[1, 1], [2, 3]]), neutral), logits)


def test_forbidden_logits_stay_forbidden_under_every_penalty():
    logits = torch.full((1, 2, 4), float("-inf"))
    logits[..., 1] = 1.0
    counts = torch.full((1, 4), IN_PROMPT + 3, dtype=torch.int32)
    found = penalise(logits, counts, torch.tensor([[0]]), penalties([0.5], [-2.0], [-2.0]))
    assert torch.isinf(found[..., 0]).all() and torch.isfinite(found[..., 1]).all()


def test_rules_hold_before_their_position_only():
    rules = torch.tensor([[[2, 10], [2, 1 << 62], [0, 0]]])
    addends = torch.tensor([[5.0, 1.0, 9.0]])
    positions = torch.tensor([[8, 9, 10]])
    found = apply_rules(torch.zeros(1, 3, 4), rules, addends, positions)
    assert found[0, :, 2].tolist() == [6.0, 6.0, 1.0]
    assert found[0, :, [0, 1, 3]].abs().sum() == 0


@pytest.mark.parametrize("seed", range(4))
def test_banned_words_end_at_every_rows_own_prefix(seed):
    generator = torch.Generator().manual_seed(seed)
    recent = [int(t) for t in torch.randint(0, 3, (7,), generator=generator)]
    recent[:2] = [-1, -1]
    tokens = [int(t) for t in torch.randint(0, 3, (WIDTH,), generator=generator)]
    words = [(1,), (0, 2), (1, 1, 0), (2, 2), (0, 1, 2, 0, 1, 2, 0, 1)]
    table = torch.full((1, 8, 8), -1)
    for place, word in enumerate(words):
        table[0, place, 8 - len(word) :] = torch.tensor(word)
    found = ban_words(
        torch.zeros(1, WIDTH, 4), table, torch.tensor([recent]), torch.tensor([tokens])
    )
    for row in range(WIDTH):
        history = [t for t in (*recent, *tokens[: row + 1]) if t >= 0]
        banned = {
            word[-1]
            for word in words
            if len(word) == 1 or tuple(history[-len(word) + 1 :]) == word[:-1]
        }
        assert {t for t in range(4) if torch.isinf(found[0, row, t])} == banned

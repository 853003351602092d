"""The target's logits against transformers, at every position, however the rows are cut."""

from __future__ import annotations

import pytest
import torch

from tests.support.recipe_driver import Lane, RecipeDriver

LOGITS_ATOL = 1e-4
"""Measured at most 4e-5 over all variants, rounds and drafts; transformers differs from itself by
2e-5 between one pass and many."""


def largest_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """inf where anything is NaN, so that a comparison with it fails."""
    error = float((got - wanted).abs().max())
    return error if error == error else float("inf")


def run_rounds(driver: RecipeDriver, lane: Lane, tokens: list[int], width: int) -> torch.Tensor:
    """Feed tokens in rounds of `width`, all accepted; logits [len, V]."""
    pieces = []
    for at in range(0, len(tokens), width):
        row = tokens[at : at + width]
        verified = driver.verify([lane], [row])
        pieces.append(verified.output.logits[0])
        driver.commit(verified, [len(row)])
    return torch.cat(pieces)


def test_logits_equal_oracle_one_token_at_a_time(tiny):
    [lane] = tiny.fresh()
    logits = run_rounds(tiny.driver, lane, tiny.tokens, 1)
    assert largest_error(logits, tiny.oracle.logits) <= LOGITS_ATOL


@pytest.mark.parametrize("width", [2, 6, 8])
def test_logits_equal_oracle_in_rounds_after_a_prefill(tiny, width):
    [lane] = tiny.fresh()
    first = tiny.driver.prefill([lane], [tiny.tokens[:13]])[0]
    logits = torch.cat((first, run_rounds(tiny.driver, lane, tiny.tokens[13:], width)))
    assert largest_error(logits, tiny.oracle.logits) <= LOGITS_ATOL


@pytest.mark.parametrize("chunk", [7, 16, 64, 150])
def test_logits_equal_oracle_for_any_prefill_chunk(tiny, chunk):
    [lane] = tiny.fresh()
    pieces = [
        tiny.driver.prefill([lane], [tiny.tokens[at : at + chunk]])[0]
        for at in range(0, len(tiny.tokens), chunk)
    ]
    assert largest_error(torch.cat(pieces), tiny.oracle.logits) <= LOGITS_ATOL


def test_logits_equal_oracle_for_prefill_chunks_of_one_and_two_tokens(tiny):
    [lane] = tiny.fresh()
    pieces, at = [], 0
    for size in [1] * 6 + [2] * 9 + [1, 40, 1, 1, 2]:
        pieces += tiny.driver.prefill([lane], [tiny.tokens[at : at + size]])
        at += size
    assert largest_error(torch.cat(pieces), tiny.oracle.logits[:at]) <= LOGITS_ATOL


def test_round_continues_a_prefill_and_a_prefill_continues_a_round(tiny):
    [lane] = tiny.fresh()
    driver, tokens = tiny.driver, tiny.tokens
    pieces = [driver.prefill([lane], [tokens[:30]])[0]]
    pieces.append(run_rounds(driver, lane, tokens[30:51], 4))
    pieces.append(driver.prefill([lane], [tokens[51:90]])[0])
    pieces.append(run_rounds(driver, lane, tokens[90:101], 7))
    wanted = tiny.oracle.logits[:101]
    assert largest_error(torch.cat(pieces), wanted) <= LOGITS_ATOL


def test_prefill_of_lanes_of_different_lengths_with_padded_lanes(tiny):
    lanes = tiny.fresh(3)
    driver, tokens = tiny.driver, tiny.tokens
    cuts = [(40, 3, 90), (41, 60, 91), (105, 61, 130)]
    for before, after in zip([(0, 0, 0), *cuts], cuts, strict=False):
        chunks = [tokens[a:b] for a, b in zip(before, after, strict=True)]
        logits = driver.prefill(lanes, chunks, padded=2)
        for got, a, b in zip(logits, before, after, strict=True):
            assert largest_error(got, tiny.oracle.logits[a:b]) <= LOGITS_ATOL


def test_last_only_gives_the_last_valid_row_of_each_lane(tiny):
    lanes = tiny.fresh(2)
    logits = tiny.driver.prefill(lanes, [tiny.tokens[:37], tiny.tokens[:70]], last_only=True)
    for got, length in zip(logits, (37, 70), strict=True):
        wanted = tiny.oracle.logits[length - 1 : length]
        assert got.shape == wanted.shape
        assert largest_error(got, wanted) <= LOGITS_ATOL


def test_feedback_and_sampling_rows_equal_the_oracle(tiny):
    [lane] = tiny.fresh()
    tiny.driver.prefill([lane], [tiny.tokens[:90]])
    output = tiny.driver.verify([lane], [tiny.tokens[90:98]]).output
    assert largest_error(output.feedback[0], tiny.oracle.feedback[90:98]) <= LOGITS_ATOL
    assert largest_error(output.sampling[0], tiny.oracle.sampling[90:98]) <= LOGITS_ATOL
    logits = tiny.driver.target.head(output.sampling[0])
    assert largest_error(logits, tiny.oracle.logits[90:98]) <= LOGITS_ATOL


def test_selected_sets_equal_the_oracle_in_every_layer(hybrid, monkeypatch):
    driver, spied = hybrid.driver, {}
    block_type = type(driver.drafter._attention)
    original = block_type.select

    def select(self, *args):
        chosen = original(self, *args)
        spied.setdefault(id(self), []).append(chosen[0])
        return chosen

    monkeypatch.setattr(block_type, "select", select)
    [lane] = hybrid.fresh()
    driver.prefill([lane], [hybrid.tokens[:101]], columns=3)
    for at in range(101, 150, 7):
        verified = driver.verify([lane], [hybrid.tokens[at : at + 7]], columns=3)
        driver.commit(verified, [verified.rows.tokens.shape[1]])
    layers = {
        id(part): layer.number
        for layer in driver.target._layers
        for part in (getattr(layer, name) for name in layer.__slots__)
        if isinstance(part, block_type)
    }
    assert set(spied) == set(layers)
    for key, number in layers.items():
        rows = [set(row[row >= 0].tolist()) for piece in spied[key] for row in piece]
        assert rows == hybrid.oracle.selected[number]


def test_a_row_that_ends_a_pool_need_not_attend_to_itself(hybrid):
    """Else the tests could not tell selection from an always visible self."""
    sets = [rows for number, rows in hybrid.oracle.selected.items()]
    assert any(place not in row for rows in sets for place, row in enumerate(rows))

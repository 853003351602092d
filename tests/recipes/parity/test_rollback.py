"""Rejected rows leave no trace: every accepted count, deliberately wrong drafts, wide to narrow."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error
from tests.support.recipe_driver import RecipeDriver


def wrong(token: int, vocabulary: int) -> int:
    """Another token than the sequence has here."""
    return 3 + (token + 41) % (vocabulary - 12)


def candidate_row(tiny, at: int, width: int, emitted: int) -> list[int]:
    """Tokens at `at`.. of which the first `emitted` are the sequence's."""
    row = tiny.tokens[at : at + width]
    return row[:emitted] + [
        wrong(token, tiny.driver.geometry.vocab_size) for token in row[emitted:]
    ]


def speculate(tiny, lanes, emitted_of, *, width=8, depth=7, stale=0):
    """Rounds of draft, verify, commit until each lane has consumed the sequence.

    Args:
        emitted_of: (round, lane) -> accepted inputs 1 .. width.
        stale: added to the live column after each commit (a fault, for negative controls).
    Returns:
        (largest target error, largest drafter error) over accepted rows.
    """
    driver, oracle = tiny.driver, tiny.oracle
    target_error = drafter_error = 0.0
    open_lanes, turn = list(range(len(lanes))), 0
    while open_lanes:
        active = [lanes[i] for i in open_lanes]
        left = [len(tiny.tokens) - lane.consumed for lane in active]
        emitted = [min(emitted_of(turn, i), room) for i, room in zip(open_lanes, left, strict=True)]
        forced = torch.tensor([[5 + (turn * 7 + i) % 90] * depth for i in open_lanes])
        pending = [tiny.tokens[lane.consumed] for lane in active]
        sink = driver.propose(active, pending, depth, forced=forced, padded=1) if depth else None
        rows = [
            candidate_row(tiny, lane.consumed, min(width, room), count)
            for lane, room, count in zip(active, left, emitted, strict=True)
        ]
        verified = driver.verify(active, rows, width=width, padded=1)
        for i, (lane, count) in enumerate(zip(active, emitted, strict=True)):
            at = lane.consumed
            got = verified.output.logits[i, :count]
            error = largest_error(got, oracle.logits[at : at + count])
            target_error = max(target_error, error)
            if sink is not None:
                error = largest_error(sink.logits[0][i], oracle.mtp_logits[at - 1])
                drafter_error = max(drafter_error, error)
        driver.commit(verified, emitted)
        for lane in active:
            lane.column = (lane.column + stale) % 8
        open_lanes = [i for i in open_lanes if lanes[i].consumed < len(tiny.tokens)]
        turn += 1
    return target_error, drafter_error


def prompted(tiny, lengths):
    """Fresh lanes with prompts of the given lengths."""
    lanes = tiny.fresh(len(lengths))
    tiny.driver.prefill(lanes, [tiny.tokens[:length] for length in lengths], padded=1)
    return lanes


def test_every_accepted_count_in_every_order_equals_oracle(tiny):
    """Eight lanes of different prompts cycle through counts 1 .. 8, each against the others."""
    lanes = prompted(tiny, [1, 2, 3, 4, 17, 30, 63, 64])
    errors = speculate(tiny, lanes, lambda turn, i: (turn * (1 + i % 3) + i) % 8 + 1)
    assert max(errors) <= LOGITS_ATOL


@pytest.mark.slow
@pytest.mark.parametrize("emitted", range(1, 9))
def test_a_constant_accepted_count_equals_oracle(tiny, emitted):
    errors = speculate(tiny, prompted(tiny, [9]), lambda turn, i: emitted)
    assert max(errors) <= LOGITS_ATOL


@pytest.mark.slow
@pytest.mark.parametrize("width", range(1, 8))
def test_every_width_with_every_accepted_count_equals_oracle(tiny, width):
    lanes = prompted(tiny, [1, 6, 31, 62])
    errors = speculate(
        tiny, lanes, lambda turn, i: (turn + i) % width + 1, width=width, depth=width - 1
    )
    assert max(errors) <= LOGITS_ATOL


def test_width_eight_to_one_keeps_eight_preceding_accepted_inputs(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = prompted(tiny, [21])
    for at in (21, 29):
        verified = driver.verify([lane], [tokens[at : at + 8]])
        driver.commit(verified, [8])
    assert lane.column == 7
    for at in range(37, 45):
        verified = driver.verify([lane], [[tokens[at]]])
        assert largest_error(verified.output.logits[0], tiny.oracle.logits[at : at + 1]) <= (
            LOGITS_ATOL
        )
        driver.commit(verified, [1])
    verified = driver.verify([lane], [tokens[45:53]])
    assert largest_error(verified.output.logits[0], tiny.oracle.logits[45:53]) <= LOGITS_ATOL


def test_rounds_without_drafts_keep_the_drafter_ready(tiny):
    """Width-one rounds absorb the pending pair alone; a later proposal sees no gap (C6)."""
    driver, tokens, oracle = tiny.driver, tiny.tokens, tiny.oracle
    [lane] = prompted(tiny, [10])
    for at in range(10, 32):
        driver.propose([lane], [tokens[at]], 0)
        verified = driver.verify([lane], [[tokens[at]]])
        driver.commit(verified, [1])
    sink = driver.propose([lane], [tokens[32]], 3)
    assert largest_error(sink.logits[0][0], oracle.mtp_logits[31]) <= LOGITS_ATOL


# Negative controls: the same comparison must catch each fault.


def test_a_stale_state_column_is_caught(hybrid):
    lanes = prompted(hybrid, [20])
    target_error, _ = speculate(hybrid, lanes, lambda turn, i: 3, depth=0, stale=1)
    assert target_error > LOGITS_ATOL


@pytest.mark.parametrize("name", ["wide", "flat", "pooled", "qwen-fused", "qwen-single"])
def test_a_ring_of_one_pool_is_caught(load_tiny, monkeypatch, name):
    tiny = load_tiny(name)
    pool = tiny.driver.pool
    family = type(tiny.driver.target).__module__.rpartition(".")[0]
    for module in ("state", "blocks"):
        monkeypatch.setattr(f"{family}.{module}.ring_entries", lambda _: pool)
    short = type(tiny)(
        tiny.name, tiny.folder, tiny.reference, tiny.oracle, RecipeDriver(tiny.folder, slots=8)
    )
    rings = [g for g in short.driver.store.spec_groups if g.kind == "ring"]
    assert rings and all(group.entries == pool for group in rings)
    target_error, _ = speculate(short, prompted(short, [20]), lambda turn, i: 1 + turn % 2)
    assert target_error > LOGITS_ATOL


def test_a_tail_of_the_wrong_row_is_caught(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = prompted(tiny, [20])
    verified = driver.verify([lane], [candidate_row(tiny, 20, 8, 3)])
    driver.commit(verified, [3])
    lane.tail = verified.output.feedback[0, 3].clone()
    sink = driver.propose([lane], [tokens[23]], 1)
    assert largest_error(sink.logits[0][0], tiny.oracle.mtp_logits[22]) > LOGITS_ATOL

"""The gated delta rule's compiled and chunked forms against the loop that defines it."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.gated_delta import chunked
from flare_ray.device.ops.gated_delta.api import (
    GatedDeltaRule,
    GatedRows,
    HeadShape,
    SavedStates,
)
from flare_ray.device.ops.gated_delta.reference import gated_delta_rule
from flare_ray.errors import ContractViolation

ATOL = 3e-6
"""Outputs and states of order one against a float64 loop; measured 1e-6."""
SHAPES = [HeadShape(2, 6, 8, 12), HeadShape(3, 3, 16, 8)]


@pytest.fixture(autouse=True)
def inference(random_seed):
    torch.manual_seed(random_seed)
    with torch.inference_mode():
        yield


def random_rows(batch: int, width: int, heads: HeadShape) -> GatedRows:
    """Decays from almost none to far below what float32 can undo."""
    return GatedRows(
        mixed=torch.randn(batch, width, heads.channels),
        log_decay=-torch.randn(batch, width, heads.value_heads).mul(2).exp(),
        beta=torch.rand(batch, width, heads.value_heads),
    )


def exact(rows: GatedRows, state: torch.Tensor, heads: HeadShape):
    wide = GatedRows(rows.mixed.double(), rows.log_decay.double(), rows.beta.double())
    return gated_delta_rule(wide, state.double(), heads)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("width", range(1, 9))
def test_round_equals_the_loop_and_saves_every_state(heads, width):
    batch, states = 3, torch.randn(60, *heads.state)
    rows, read = random_rows(batch, width, heads), torch.tensor([5, 0, 17])
    write = torch.randperm(40)[: batch * width] + 20
    saved = SavedStates(states.clone(), read, write)
    output = GatedDeltaRule(heads).round(rows, saved)
    wanted, after = exact(rows, states[read], heads)
    assert torch.allclose(output.double(), wanted, atol=ATOL)
    assert torch.allclose(saved.rows[write].double(), after.flatten(0, 1), atol=ATOL)
    untouched = torch.ones(60, dtype=torch.bool)
    untouched[write] = False
    assert torch.equal(saved.rows[untouched], states[untouched])


def test_round_may_overwrite_the_state_it_started_from():
    heads = SHAPES[0]
    rows, states = random_rows(1, 4, heads), torch.randn(8, *heads.state)
    saved = SavedStates(states.clone(), torch.tensor([2]), torch.arange(4))
    output = GatedDeltaRule(heads).round(rows, saved)
    wanted, after = exact(rows, states[2:3], heads)
    assert torch.allclose(output.double(), wanted, atol=ATOL)
    assert torch.allclose(saved.rows[:4].double(), after[0], atol=ATOL)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 65, 130])
def test_prefill_equals_the_loop_and_keeps_the_last_valid_state(heads, width):
    rows, states = random_rows(3, width, heads), torch.randn(9, *heads.state)
    lengths = torch.tensor([width, max(1, width // 2), 1])
    valid = torch.arange(width) < lengths.unsqueeze(1)
    saved = SavedStates(states.clone(), torch.tensor([4, 5, 6]), torch.tensor([1, 2, 3]))
    output = GatedDeltaRule(heads).prefill(rows, saved, valid)
    wanted, after = exact(rows, states[4:7], heads)
    assert torch.allclose(output[valid].double(), wanted[valid], atol=ATOL)
    last = after[torch.arange(3), lengths - 1]
    assert torch.allclose(saved.rows[1:4].double(), last, atol=ATOL)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 150])
def test_chunked_form_equals_the_loop(width):
    heads = SHAPES[0]
    rows, state = random_rows(2, width, heads), torch.randn(2, *heads.state)
    output, last = chunked.run(rows, state, heads)
    wanted, after = exact(rows, state, heads)
    assert torch.allclose(output.double(), wanted, atol=ATOL)
    assert torch.allclose(last.double(), after[:, -1], atol=ATOL)


def test_chunking_a_prompt_changes_no_bit_of_the_compiled_form():
    heads, rule = SHAPES[0], GatedDeltaRule(SHAPES[0])
    rows, states = random_rows(1, 20, heads), torch.randn(2, *heads.state)
    place = torch.tensor([0])
    whole = SavedStates(states.clone(), place, place)
    rule.prefill(rows, whole, torch.ones(1, 20, dtype=torch.bool))
    cut = SavedStates(states.clone(), place, place)
    for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
        piece = GatedRows(rows.mixed[:, part], rows.log_decay[:, part], rows.beta[:, part])
        rule.prefill(piece, cut, torch.ones(piece.beta.shape[:2], dtype=torch.bool))
    assert torch.equal(whole.rows, cut.rows)


def test_rows_of_other_heads_are_refused():
    rows = random_rows(1, 2, SHAPES[0])
    saved = SavedStates(torch.zeros(4, *SHAPES[1].state), torch.tensor([0]), torch.arange(2))
    with pytest.raises(ContractViolation, match="mixed has shape"):
        GatedDeltaRule(SHAPES[1]).round(rows, saved)

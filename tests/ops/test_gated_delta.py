"""The gated delta rule's compiled and chunked forms against the loop that defines it."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.ops.gated_delta import chunked, records
from flare_ray.device.ops.gated_delta.api import (
    GatedDeltaRule,
    GatedRows,
    HeadShape,
    RecordedStates,
    Records,
    SavedStates,
)
from flare_ray.device.ops.gated_delta.records import forget, replayed
from flare_ray.device.ops.gated_delta.reference import gated_delta_rule
from flare_ray.errors import ContractViolation

ATOL = 3e-6
"""Outputs and states of order one against a float64 loop; measured 1e-6."""
SHAPES = [HeadShape(2, 6, 8, 12), HeadShape(3, 3, 16, 8)]


pytestmark = pytest.mark.usefixtures("inference")


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


# The compact form (contract: M2).


def no_records(slots: int, heads: HeadShape) -> Records:
    """Records that were never written, but for entry 0."""
    made = Records(
        torch.full((slots, 8, heads.value_heads, heads.value_dim), float("nan")),
        torch.full((slots, 8, heads.key_heads, heads.key_dim), float("nan")),
        torch.full((slots, 8, heads.value_heads), float("nan")),
    )
    forget(made, torch.arange(slots))
    return made


class Both:
    """The same lanes in columns and in records, in slots of their own order."""

    def __init__(self, heads: HeadShape, batch: int) -> None:
        self.rule, self.batch = GatedDeltaRule(heads), batch
        start = torch.randn(batch + 2, *heads.state)
        self.columns = start.unsqueeze(1).repeat(1, 8, 1, 1, 1)
        self.base, self.records = start.clone(), no_records(batch + 2, heads)
        self.slots = torch.randperm(batch + 2)[:batch]
        self.column = torch.zeros(batch, dtype=torch.int64)

    def round(self, width: int, emitted: torch.Tensor) -> bool:
        """Whether outputs and live states are equal bit by bit; `emitted` [B] rows are accepted."""
        rows = random_rows(self.batch, width, self.rule.heads)
        places = self.slots.unsqueeze(1) * 8 + torch.arange(width)
        saved = SavedStates(
            self.columns.flatten(0, 1), self.slots * 8 + self.column, places.view(-1)
        )
        wanted = self.rule.round(rows, saved)
        got = self.rule.recorded_round(
            rows, RecordedStates(self.base, self.records, self.slots, self.column)
        )
        self.column = emitted - 1
        return torch.equal(got, wanted) and torch.equal(*self.live())

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Live states as columns and as records."""
        rebuilt = replayed(self.base, self.records, self.slots, self.column + 1)
        return self.columns[self.slots, self.column], rebuilt

    def prefill(self, width: int) -> bool:
        rows = random_rows(self.batch, width, self.rule.heads)
        valid = torch.arange(width) < torch.randint(1, width + 1, (self.batch, 1))
        saved = SavedStates(
            self.columns.flatten(0, 1), self.slots * 8 + self.column, self.slots * 8
        )
        wanted = self.rule.prefill(rows, saved, valid)[valid]
        states = RecordedStates(self.base, self.records, self.slots, self.column)
        got = self.rule.recorded_prefill(rows, states, valid)[valid]
        self.column = torch.zeros_like(self.column)
        return torch.equal(got, wanted) and torch.equal(*self.live())


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_records_give_the_bits_of_saved_columns_over_random_rounds(heads, rounds):
    both = Both(heads, 3)
    for _ in range(rounds):
        width = int(torch.randint(1, 9, ()))
        assert both.round(width, torch.randint(1, width + 1, (3,)))
        if torch.rand(()) < 0.05:
            assert both.prefill(int(torch.randint(1, 20, ())))


def test_width_eight_to_one_to_eight_and_a_round_without_drafts_after_acceptance():
    both = Both(SHAPES[0], 2)
    for width, emitted in ((8, 8), (1, 1), (1, 1), (8, 5), (1, 1), (8, 1), (8, 8), (2, 2)):
        assert both.round(width, torch.full((2,), emitted))


def test_one_stale_record_is_caught():
    """Negative control: the comparison sees a record of another row."""
    both = Both(SHAPES[0], 1)
    assert both.round(4, torch.tensor([3]))
    both.records.corrections[both.slots, 1] = both.records.corrections[both.slots, 2]
    assert not torch.equal(*both.live())


@pytest.mark.parametrize("count", range(9))
def test_torch_form_of_the_replay_gives_the_same_states(count):
    both = Both(SHAPES[0], 3)
    both.round(8, torch.tensor([8, 8, 8]))
    counts = torch.tensor([count, 8 - count, 4])
    plain = records._replayed(both.base, both.records, both.slots, counts)
    compiled = replayed(both.base, both.records, both.slots, counts)
    assert torch.allclose(plain, compiled, atol=ATOL)


def test_torch_form_of_the_recorded_round_gives_the_same_outputs_and_states(monkeypatch):
    both = Both(SHAPES[0], 2)
    base, kept = both.base.clone(), no_records(4, SHAPES[0])
    rows = random_rows(2, 5, SHAPES[0])
    states = RecordedStates(both.base, both.records, both.slots, both.column)
    compiled = both.rule.recorded_round(rows, states)
    for module in ("api", "records"):
        monkeypatch.setattr(
            f"flare_ray.device.ops.gated_delta.{module}._compiles", lambda saved: False
        )
    plain = both.rule.recorded_round(rows, RecordedStates(base, kept, both.slots, both.column))
    assert torch.allclose(plain, compiled, atol=ATOL)
    for ours, theirs in zip(
        (kept.corrections, kept.keys, kept.decays),
        (both.records.corrections, both.records.keys, both.records.decays),
        strict=True,
    ):
        assert torch.allclose(ours[both.slots, :5], theirs[both.slots, :5], atol=ATOL)


def test_a_record_is_a_hundredth_of_a_state():
    """At the released geometry, per saved position of 36 layers: 108 MiB and 1.13 MiB."""
    heads = HeadShape(16, 48, 128, 128)
    state = 36 * 4 * heads.value_heads * heads.key_dim * heads.value_dim
    record = 36 * 4 * (heads.value_heads * 129 + heads.key_heads * 128)
    assert (state, record) == (113_246_208, 1_186_560)
    assert 95 < state / record < 96


def test_more_rows_than_records_are_refused():
    both = Both(SHAPES[0], 1)
    states = RecordedStates(both.base, both.records, both.slots, both.column)
    with pytest.raises(ContractViolation, match="9 rows in a round, 8 records are kept"):
        both.rule.recorded_round(random_rows(1, 9, SHAPES[0]), states)

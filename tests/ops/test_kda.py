"""The delta rule's two fast forms against the loop that defines it."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.layers import kda as kda_layer
from flare_ray.device.layers.rows import round_rows
from flare_ray.device.ops.kda import chunked
from flare_ray.device.ops.kda.api import DeltaRows, DeltaRule, SavedStates
from flare_ray.device.ops.kda.reference import delta_rule
from flare_ray.errors import ContractViolation

ATOL = 3e-6
"""Outputs and states of order one against a float64 loop; measured 1e-6."""
BOUND = -5.0


pytestmark = pytest.mark.usefixtures("inference")


def random_rows(batch: int, width: int, *, heads: int = 3, dim: int = 16) -> DeltaRows:
    """Decays from almost none to the bound."""
    return DeltaRows(
        qkv=torch.randn(batch, width, 3, heads, dim),
        log_decay=BOUND * torch.sigmoid(3 * torch.randn(batch, width, heads, dim)),
        beta=torch.rand(batch, width, heads),
    )


def random_states(count: int, *, heads: int = 3, dim: int = 16) -> torch.Tensor:
    return torch.randn(count, heads, dim, dim)


def exact(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (rows.qkv, rows.log_decay, rows.beta, state)
    return delta_rule(*(part.double() for part in parts))


RULE = DeltaRule(max_width=8, lower_bound=BOUND)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("batch", [1, 3])
def test_round_equals_the_loop_and_saves_every_state(batch, width):
    rows, states = random_rows(batch, width), random_states(60)
    read = torch.tensor([5, 0, 17])[:batch]
    write = torch.randperm(40)[: batch * width] + 20
    saved = SavedStates(states.clone(), read, write)
    output = RULE.round(rows, saved)
    wanted, after = exact(rows, states[read])
    assert torch.allclose(output.double(), wanted, atol=ATOL)
    assert torch.allclose(saved.rows[write].double(), after.flatten(0, 1), atol=ATOL)
    untouched = torch.ones(60, dtype=torch.bool)
    untouched[write] = False
    assert torch.equal(saved.rows[untouched], states[untouched])


def test_round_may_overwrite_the_state_it_started_from():
    rows, states = random_rows(1, 4), random_states(8)
    saved = SavedStates(states.clone(), torch.tensor([2]), torch.arange(4))
    output = RULE.round(rows, saved)
    wanted, after = exact(rows, states[2:3])
    assert torch.allclose(output.double(), wanted, atol=ATOL)
    assert torch.allclose(saved.rows[:4].double(), after[0], atol=ATOL)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 70])
def test_prefill_equals_the_loop_and_keeps_the_last_valid_state(width):
    rows, states = random_rows(3, width), random_states(9)
    lengths = torch.tensor([width, max(1, width // 2), 1])
    valid = torch.arange(width) < lengths.unsqueeze(1)
    saved = SavedStates(states.clone(), torch.tensor([4, 5, 6]), torch.tensor([1, 2, 3]))
    output = RULE.prefill(rows, saved, valid)
    wanted, after = exact(rows, states[4:7])
    assert torch.allclose(output[valid].double(), wanted[valid], atol=ATOL)
    last = after[torch.arange(3), lengths - 1]
    assert torch.allclose(saved.rows[1:4].double(), last, atol=ATOL)


def test_two_prefills_equal_one():
    rows, states = random_rows(1, 45), random_states(2)
    whole = SavedStates(states.clone(), torch.tensor([0]), torch.tensor([1]))
    RULE.prefill(rows, whole, torch.ones(1, 45, dtype=torch.bool))
    parts = SavedStates(states.clone(), torch.tensor([0]), torch.tensor([1]))
    for cut in (slice(0, 19), slice(19, 45)):
        part = DeltaRows(rows.qkv[:, cut], rows.log_decay[:, cut], rows.beta[:, cut])
        RULE.prefill(part, parts, torch.ones(1, cut.stop - cut.start, dtype=torch.bool))
        parts.read = torch.tensor([1])
    assert torch.allclose(whole.rows[1], parts.rows[1], atol=ATOL)


@pytest.mark.parametrize("bound", [-0.5, -5.0, -12.0, -79.0])
def test_lowest_decays_neither_overflow_nor_vanish_wrongly(bound):
    """exp(G_i) exp(-G_j) would overflow float32 within a chunk at these decays."""
    rule = DeltaRule(max_width=8, lower_bound=bound)
    for width in (8, 40):
        rows, states = random_rows(2, width), random_states(40)
        rows.log_decay = torch.full_like(rows.log_decay, bound)
        write = torch.arange(2 * width if width == 8 else 2) + 2
        saved = SavedStates(states.clone(), torch.tensor([0, 1]), write)
        if width == 8:
            output = rule.round(rows, saved)
        else:
            output = rule.prefill(rows, saved, torch.ones(2, width, dtype=torch.bool))
        wanted, _ = exact(rows, states[:2])
        assert torch.allclose(output.double(), wanted, atol=ATOL)


def test_a_bound_beyond_float32_is_refused():
    assert chunked.sub_block_rows(-80.0) == 1
    with pytest.raises(ContractViolation, match="log decay bound -81"):
        DeltaRule(max_width=8, lower_bound=-81.0)


def test_shapes_are_checked():
    rows, states = random_rows(2, 3), random_states(8)
    with pytest.raises(ContractViolation, match="write has shape"):
        RULE.round(rows, SavedStates(states, torch.tensor([0, 1]), torch.arange(5)))
    with pytest.raises(ContractViolation, match="read has shape"):
        RULE.round(rows, SavedStates(states, torch.tensor([0]), torch.arange(6)))
    with pytest.raises(ContractViolation, match="prepared for 8"):
        wide = random_rows(1, 9)
        RULE.round(wide, SavedStates(random_states(12), torch.tensor([0]), torch.arange(9)))


@pytest.mark.parametrize("width", [1, 6])
def test_compiled_round_of_a_block_equals_its_parts(width, monkeypatch):
    heads, dim, hidden = 2, 16, 24
    channels = 3 * heads * dim
    weights = kda_layer.KdaWeights(
        joint=torch.randn(channels + heads + 2 * dim, hidden) / 5,
        taps=torch.randn(4, channels),
        gates=torch.randn(2, dim, heads * dim) / 4,
        dt_bias=torch.randn(heads * dim),
        a_log=torch.randn(heads) / 4,
        norm=torch.rand(dim) + 0.5,
        output=torch.randn(hidden, heads * dim) / 5,
    )
    block = kda_layer.KdaBlock(weights, RULE, lower_bound=BOUND, eps=1e-5)
    # Lanes of slots 2 and 0, whose live columns are the second and the fifth.
    rows = round_rows(torch.tensor([2, 0]), torch.tensor([1, 4]), width=width, keep=3)
    x = torch.randn(2 * width, hidden)
    states, window = torch.randn(4, 8, heads, dim, dim), torch.randn(4, 11, channels)
    results = []
    for fits in (True, False):
        monkeypatch.setattr(kda_layer, "fits_gated", lambda states, fits=fits: fits)
        held = states.clone(), window.clone()
        results.append((block(x, rows, *held), *held))
    for compiled, plain in zip(*results, strict=True):
        assert torch.allclose(compiled, plain, atol=1e-5)

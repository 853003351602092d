"""The target's logits against the equations, however a sequence is consumed (contract: R7)."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.deepseek_v41.conftest import LENGTH
from tests.recipes.parity.test_target import largest_error

LOGITS_ATOL = 1e-4
"""Bound of the contract for float32; 3e-5 were seen, of logits of standard deviation 3."""
CHUNKS = (1, 2, 5, 8, 3, 16, 17, 30, 1, 1, 40, 26)
"""Around windows of 16 and 24, groups of 2 and 4, and passes longer than a ring."""


def consumed_in(tiny, chunks) -> torch.Tensor:
    (lane,) = tiny.fresh()
    parts, at = [], 0
    for size in chunks:
        parts.append(tiny.driver.prefill([lane], [tiny.tokens[at : at + size]])[0])
        at += size
    return torch.cat(parts)


def rounds_of(tiny, width: int) -> torch.Tensor:
    """Logits of the accepted rows of rounds of one width; accepted counts go round."""
    (lane,) = tiny.fresh()
    parts = [tiny.driver.prefill([lane], [tiny.tokens[:3]])[0]]
    count = 0
    while lane.consumed < LENGTH:
        emitted = min(count % width + 1, LENGTH - lane.consumed)
        row = tiny.row(lane.consumed, width, emitted)
        verified = tiny.driver.verify([lane], [row])
        parts.append(verified.output.logits[0, :emitted].clone())
        tiny.driver.commit(verified, [emitted])
        count += 1
    return torch.cat(parts)


@pytest.mark.parametrize("chunks", [(LENGTH,), CHUNKS], ids=["whole", "chunks"])
def test_prefill_equals_the_equations_at_every_position(tiny, chunks):
    assert largest_error(consumed_in(tiny, chunks), tiny.oracle.logits) <= LOGITS_ATOL


@pytest.mark.parametrize("name", ["sparse", pytest.param("pooled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_rounds_of_any_width_equal_the_equations_at_every_position(load_tiny, name, width):
    tiny = load_tiny(name)
    assert largest_error(rounds_of(tiny, width), tiny.oracle.logits) <= LOGITS_ATOL


def test_context_features_are_the_plain_mean_of_the_tapped_inputs(tiny):
    (lane,) = tiny.fresh()
    verified = tiny.driver.verify([lane], [tiny.tokens[:8]])
    assert largest_error(verified.output.feedback[0], tiny.oracle.features[:8]) <= LOGITS_ATOL
    assert largest_error(verified.output.sampling[0], tiny.oracle.hidden[:8]) <= LOGITS_ATOL


def test_lanes_of_one_pass_do_not_see_each_other(tiny):
    lanes = tiny.fresh(3)
    starts = (40, 17, 3)
    tiny.driver.prefill(lanes, [tiny.tokens[:n] for n in starts], padded=1)
    for _ in range(3):
        rows = [tiny.tokens[lane.consumed : lane.consumed + 4] for lane in lanes]
        verified = tiny.driver.verify(lanes, rows, width=6, padded=1)
        for place, lane in enumerate(lanes):
            wanted = tiny.oracle.logits[lane.consumed : lane.consumed + 4]
            assert largest_error(verified.output.logits[place, :4], wanted) <= LOGITS_ATOL
        tiny.driver.commit(verified, [4, 2, 1])


def test_rounded_keys_equal_the_equations(load_tiny):
    tiny = load_tiny("rounded")
    for got in (consumed_in(tiny, (LENGTH,)), rounds_of(tiny, 5)):
        assert largest_error(got, tiny.oracle.logits) <= LOGITS_ATOL


def test_rounding_of_keys_shows_in_the_logits(load_tiny):
    tiny = load_tiny("rounded")
    tiny.reference.text["kv_fake_quantisation"] = False
    try:
        without = tiny.reference.run(tiny.tokens)
    finally:
        tiny.reference.text["kv_fake_quantisation"] = True
    assert largest_error(without.logits, tiny.oracle.logits) > 1000 * LOGITS_ATOL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.attn.attn_sink", -20.0),
        ("layers.2.attn.compressor.wgate.weight", 0.0),
        ("layers.3.hc_attn_base", 0.0),
        ("layers.1.engram.q_weight", 0.0),
        ("layers.6.attn.indexer.weights_proj.weight", 1.0),
        ("layers.5.ffn.gate.bias", 0.0),
    ],
)
def test_every_mechanism_shows_in_the_logits(load_tiny, name, value):
    """A port that drops one of them fails the comparisons above."""
    tiny = load_tiny("sparse")
    kept = tiny.reference.weights[name]
    tiny.reference.weights[name] = torch.full_like(kept, value)
    try:
        without = tiny.reference.run(tiny.tokens)
    finally:
        tiny.reference.weights[name] = kept
    assert largest_error(without.logits, tiny.oracle.logits) > 100 * LOGITS_ATOL

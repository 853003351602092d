"""Programs are capturable from birth: no operator waits for values, and padding changes nothing."""

from __future__ import annotations

import torch

from tests.recipes.parity.test_capture import run_watched


def test_no_step_of_a_round_or_a_prefill_waits_for_values(tiny):
    run_watched(tiny, drafts=7)


def test_padded_lanes_change_no_bit(tiny):
    results = []
    for padded in (0, 2):
        (lane,) = tiny.fresh()
        tiny.driver.prefill([lane], [tiny.tokens[:40]], padded=padded)
        sink = tiny.driver.propose([lane], [tiny.tokens[40]], 7, padded=padded)
        verified = tiny.driver.verify([lane], [tiny.tokens[40:46]], padded=padded)
        results.append(torch.cat((torch.stack(sink.logits)[:, 0], verified.output.logits[0])))
    assert float((results[0] - results[1]).abs().max()) < 1e-4

"""Programs are capturable from birth: no operator waits for values, and padding changes nothing."""

from __future__ import annotations

import torch

from tests.support.no_sync import NoHostWait


def test_no_step_of_a_round_or_a_prefill_waits_for_values(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    lanes = tiny.fresh(2)
    driver.prefill(lanes, [tokens[:70], tokens[:20]])
    forward, absorb, propose = (
        driver.target.forward,
        driver.drafter.absorb,
        driver.drafter.propose,
    )

    def watched(call):
        def run(*args):
            with NoHostWait():
                return call(*args)

        return run

    driver.target.forward = watched(forward)
    driver.drafter.absorb = watched(absorb)
    driver.drafter.propose = watched(propose)
    try:
        driver.prefill(lanes, [tokens[70:101], tokens[20:23]], padded=1)
        driver.propose(lanes, [tokens[101], tokens[23]], 7, padded=1)
        verified = driver.verify(lanes, [tokens[101:107], tokens[23:25]], width=8, padded=1)
        driver.commit(verified, [4, 1])
        driver.propose(lanes, [tokens[105], tokens[24]], 0)
    finally:
        del driver.target.forward, driver.drafter.absorb, driver.drafter.propose


def test_padded_lanes_change_no_bit(tiny):
    results = []
    for padded in (0, 2):
        (lane,) = tiny.fresh()
        tiny.driver.prefill([lane], [tiny.tokens[:40]], padded=padded)
        sink = tiny.driver.propose([lane], [tiny.tokens[40]], 7, padded=padded)
        verified = tiny.driver.verify([lane], [tiny.tokens[40:46]], padded=padded)
        results.append(torch.cat((torch.stack(sink.logits)[:, 0], verified.output.logits[0])))
    assert float((results[0] - results[1]).abs().max()) < 1e-4

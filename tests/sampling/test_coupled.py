"""Position-keyed draws: the compiled pass against the law written in tensors (contract: S8)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.sampling.coupled import Coupling, coupled_draws, reference_draws

SIZES = (1, 3, 4, 64, 65, 257, 1000)


def rows(vocabulary: int, spread: float, kept: float) -> torch.Tensor:
    """[3, 4, V] distributions; tokens below `kept` of the best one are cut off."""
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(torch.randn(3, 4, vocabulary, generator=generator) * spread, -1)
    return torch.where(probs >= kept * probs.amax(-1, keepdim=True), probs, 0.0)


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize(("spread", "kept"), [(0.1, 0.0), (2.0, 0.0), (6.0, 0.0), (2.0, 0.2)])
@pytest.mark.parametrize(("depth", "power"), [(0, 1.0), (3, 1.15)])
def test_compiled_draws_are_those_of_the_law(vocabulary, spread, kept, depth, power):
    probs = rows(vocabulary, spread, kept)
    keys = torch.tensor([-1, 2**63 - 1, 12345])
    coupling = Coupling(torch.ones(3).bool(), keys, torch.tensor([0, 2**31 - 2, 77]))
    found = coupled_draws(probs, coupling, depth, power=power)
    assert torch.equal(found, reference_draws(probs, coupling, depth, power=power))
    assert (probs.gather(-1, found.unsqueeze(-1)) > 0).all()


def test_other_lanes_are_passed_over():
    probs = rows(65, 1.0, 0.0)
    coupling = Coupling(torch.tensor([False, True, False]), torch.arange(3), torch.arange(3))
    found = coupled_draws(probs, coupling)
    assert torch.equal(found[1], reference_draws(probs, coupling)[1])
    assert not found[0].any() and not found[2].any()


def test_a_sharper_power_changes_draws_towards_the_best_token():
    probs = rows(257, 1.0, 0.0).expand(3, 4, 257)
    best = probs.argmax(-1)
    hits = []
    for power in (1.0, 1.5, 4.0):
        total = 0
        for position in range(0, 400, 4):
            coupling = Coupling(torch.ones(3).bool(), torch.arange(3), torch.full((3,), position))
            total += int((coupled_draws(probs, coupling, power=power) == best).sum())
        hits.append(total)
    assert hits[0] < hits[1] < hits[2]

"""Prefixes assigned by forecasts leave the emitted law alone, however wrong the forecasts are, as
long as none knows the draft it is about (contract: C4, S1)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.sampling.chain import draw, verify_chain
from flare_ray.device.speculation.packing import assigned_prefixes

LANES = 60_000
TARGET = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
DRAFT = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
START = 0
"""Token in front of every lane's first draft; rows of the tables are the token before."""
ACCEPTED_STATISTIC = 30.0
"""Chi-square of nine cells (eight degrees of freedom): exceeded once in 5,000 exact runs."""
REJECTED_STATISTIC = 300.0


def certain(lanes: torch.Tensor, first: torch.Tensor, second: torch.Tensor):
    return torch.ones(LANES), torch.ones(LANES)


def spiteful(lanes, first, second):
    """The second forecast follows the first draft, the first one nothing but the lane."""
    return (lanes % 7 + 1) / 8, torch.where(first == 1, 0.99, 0.01)


def hopeless(lanes, first, second):
    return torch.full((LANES,), 0.5), (first == 2).float()


def peeking(lanes, first, second):
    """Not allowed: the first forecast knows the first draft."""
    return torch.where(first == 2, 0.9, 0.1), torch.ones(LANES)


def joint_statistic(forecasts, capacity: int) -> float:
    """Chi-square of the first two tokens of every lane against the target's law."""
    generator = torch.Generator().manual_seed(11)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).clamp(min=1e-7)

    before = torch.full((LANES,), START)
    first = draw(DRAFT[before], uniform(LANES))
    second = draw(DRAFT[first], uniform(LANES))
    told = forecasts(torch.arange(LANES), first, second)
    offered = assigned_prefixes(
        list(told),
        torch.full((LANES,), 2),
        torch.ones(LANES, dtype=torch.bool),
        capacity=capacity,
    )
    p = torch.stack((TARGET[before], TARGET[first], TARGET[second]), dim=1)
    q = torch.stack((DRAFT[before], DRAFT[first]), dim=1)
    drafts = torch.stack((first, second), dim=1)
    result = verify_chain(p, q, drafts, offered, uniform(LANES, 4))
    head = torch.where(result.accepted > 0, first, result.token)
    later = torch.where(result.accepted > 1, second, result.token)
    # a lane that emitted one token goes on in a later round, where nothing was drafted
    tail = torch.where(result.accepted > 0, later, draw(TARGET[head], uniform(LANES)))
    counts = torch.bincount(head * 3 + tail, minlength=9).double()
    expected = (TARGET[START].unsqueeze(1) * TARGET).flatten().double() * LANES
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("forecasts", [certain, spiteful, hopeless])
@pytest.mark.parametrize("rows_per_lane", [1.2, 2.0, 2.7])
def test_assigned_prefixes_leave_the_law_alone(forecasts, rows_per_lane):
    statistic = joint_statistic(forecasts, int(rows_per_lane * LANES))
    assert statistic < ACCEPTED_STATISTIC


def test_a_forecast_that_knows_its_own_draft_is_caught():
    assert joint_statistic(peeking, int(1.5 * LANES)) > REJECTED_STATISTIC

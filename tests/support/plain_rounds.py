"""Rounds on CPU without recordings."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from flare_ray.device.graphs.replays import Replays


def run_plainly(
    self: Replays, key: Hashable, function: Callable[[], object], *, after: object = None
) -> object:
    """In the place of `Replays.run`: nothing is recorded, and nothing replayed."""
    return function()


@pytest.fixture
def plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that patches Python inside a round: a recording would not meet the patch, and one
    made under it would keep it."""
    monkeypatch.setattr(Replays, "run", run_plainly)

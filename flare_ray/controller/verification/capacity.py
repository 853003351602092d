"""What a packed round is expected to emit (contract: C4).

A packed program verifies P rows of all its lanes together. Every lane has its pending token's row;
the others go to the drafts with the largest joint forecasts, which the device assigns from the
drafter's fresh confidence (`device/speculation/packing.py`) under the ceilings that the plan froze.
The host knows only how far drafts got before, and expects the same of those rows: they go to the
largest joint survivals. What fresh confidence gains over that is learnt as one number a program,
from the tokens its rounds emitted over those expected; survival itself goes on learning from
outcomes alone.
"""

from __future__ import annotations

import numpy as np

from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification.workload import Floats

GAIN = 0.05
"""Share of a round's deviation by which what confidence gains moves in the long run: some twenty
rounds."""
LEAST_GAIN, MOST_GAIN = 0.5, 2.0
"""Bounds of one round's deviation, so that a single lucky round decides little."""

_UNMEASURED = (1.0, 0)


def packed_expected(expected: Floats, shape: GraphShape) -> Floats:
    """Tokens every lane of a packed round is expected to emit.

    Args:
        expected: [lanes, 8], entry k = tokens with k drafts, ceilings applied.
        shape: with `packed_capacity` P > lanes.
    Returns:
        [lanes], at least 1 each; P - lanes drafts are verified in all.
    """
    lanes = len(expected)
    survival = np.diff(expected[:, : shape.verify_width], axis=1)
    free = min(shape.packed_capacity - lanes, survival.size)
    # Survival only falls along a lane, so the largest ones are prefixes; equals go to lower lanes.
    order = np.argsort(-survival, axis=None, kind="stable")[:free]
    chosen = np.zeros(survival.size)
    chosen[order] = 1.0
    tokens: Floats = 1.0 + (survival * chosen.reshape(survival.shape)).sum(1)
    return tokens


class ConfidenceGain:
    """Drafted tokens that rounds of packed programs emit over those expected by survival."""

    def __init__(self) -> None:
        self._gains: dict[GraphShape, tuple[float, int]] = {}

    def of(self, shape: GraphShape) -> float:
        """1 until something was measured."""
        return self._gains.get(shape, _UNMEASURED)[0]

    def observe(self, shape: GraphShape, *, drafted: float, emitted: int) -> None:
        """A packed round emitted so many tokens beyond one a lane, `drafted` were expected."""
        if drafted > 0.0:
            ratio = min(max(emitted / drafted, LEAST_GAIN), MOST_GAIN)
            gain, rounds = self._gains.get(shape, _UNMEASURED)
            share = max(GAIN, 1.0 / (rounds + 2))
            self._gains[shape] = (gain + share * (ratio - gain), rounds + 1)

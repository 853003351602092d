"""Published adaptive policies, written anew from what their projects say they do.

Each chooses drafts for the whole batch from the same catalog as ours, with its own knowledge:

- batch schedule: a table from batch size to drafts, fixed beforehand.
- start-up curve: cost of every shape measured once at start-up (here: the true one, which is as
  good as it can be), acceptance by depth over the whole workload; best tokens over cost.
- accepted-length tiers: a moving average of accepted drafts selects among a few draft counts.
- confidence budget: the drafter's own forecast (the truth, blurred and overconfident); drafts while
  the batch's mean joint confidence holds and the row budget lasts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.policy.players import Ints, Run, Stage, play
from benchmarks.policy.traces import DEPTHS, Floats

SCHEDULE = ((4, 5), (16, 3), (64, 1))
"""(largest batch, drafts); none beyond."""
TIERS = (1, 3, 7)
TIER_GAIN = 0.2
TIER_INTERVAL = 5
CURVE_GAIN = 0.05
CURVE_PRIOR = 0.8
CONFIDENCE_BLUR = 0.6
CONFIDENCE_BIAS = 0.3
CONFIDENCE_FLOOR = 0.5
CONFIDENCE_ROWS = 256
CONFIDENCE_DRAWS = 64


def batch_schedule_drafts(lanes: int, most: int) -> int:
    """Drafts of the schedule, as far as they are captured."""
    for largest, drafts in SCHEDULE:
        if lanes <= largest:
            return min(drafts, most)
    return 0


def play_start_up_curve(stage: Stage, prices: Floats, _: float) -> Run:
    """Tokens over start-up cost, acceptance by depth of the workload."""
    chances = np.full(DEPTHS, CURVE_PRIOR)
    count = len(prices)

    def choose(_: int, classes: Ints) -> int:
        expected = np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(chances))])[:count]
        return int((expected / prices).argmax())

    def learn(drafts: int, accepted: Ints) -> None:
        for depth in range(drafts):
            tested = int((accepted >= depth).sum())
            if tested:
                passed = int((accepted > depth).sum())
                gain = 1.0 - (1.0 - CURVE_GAIN) ** tested
                chances[depth] += gain * (passed / tested - chances[depth])

    return play(stage, prices, choose, learn)


def play_tiers(stage: Stage, prices: Floats, _: float) -> Run:
    """A tier up when nearly all drafts pass, a tier down when the lower one would do."""
    most = len(prices) - 1
    tiers = sorted({min(tier, most) for tier in TIERS})
    state = {"tier": len(tiers) // 2, "mean": float(tiers[len(tiers) // 2])}

    def choose(number: int, classes: Ints) -> int:
        tier = int(state["tier"])
        if number and number % TIER_INTERVAL == 0:
            if state["mean"] >= tiers[tier] - 0.5 and tier + 1 < len(tiers):
                tier += 1
            elif tier and state["mean"] < tiers[tier - 1] + 0.25:
                tier -= 1
            state["tier"] = tier
        return tiers[tier]

    def learn(drafts: int, accepted: Ints) -> None:
        state["mean"] += TIER_GAIN * (float(accepted.mean()) - state["mean"])

    return play(stage, prices, choose, learn)


def play_confidence(stage: Stage, prices: Floats, draft_ns: float) -> Run:
    """Drafts while the mean joint confidence is at least CONFIDENCE_FLOOR, rows permitting.

    A chain has to draft the token whose confidence ends it, so a round pays one draft more than it
    verifies.
    """
    rng = np.random.default_rng(5)
    chances = stage.trace.chances
    odds = np.log(chances / (1.0 - chances)) + CONFIDENCE_BIAS
    blurred = odds + CONFIDENCE_BLUR * rng.standard_normal((CONFIDENCE_DRAWS, *odds.shape))
    joint = np.cumprod(1.0 / (1.0 + np.exp(-blurred)), 2).reshape(-1, DEPTHS)
    most = min(len(prices) - 1, max(CONFIDENCE_ROWS // stage.lanes - 1, 0))
    paid = prices.copy()
    paid[:most] += draft_ns
    draws = rng.integers(CONFIDENCE_DRAWS, size=(stage.rounds, stage.lanes)) * len(chances)

    def choose(number: int, classes: Ints) -> int:
        mean = joint.take(classes + draws[number], 0).mean(0)[:most]
        return int((mean >= CONFIDENCE_FLOOR).sum())

    return play(stage, paid, choose)


PUBLIC: dict[str, Callable[[Stage, Floats, float], Run]] = {
    "start_up_curve": play_start_up_curve,
    "accepted_tiers": play_tiers,
    "confidence_budget": play_confidence,
}
"""Those that must be played; the batch schedule is one of the fixed counts."""

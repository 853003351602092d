"""How many drafts survive: joint prefix survival by depth, per request (contract: C2).

survival[i] is the chance that the first i drafts are all accepted. It is a product of conditional
chances h[1] .. h[i], h[j] = chance that depth j is accepted given that depths 1 .. j-1 were, each
estimated from the rounds that *tested* depth j (the product-limit estimator of Kaplan and Meier
1958). A depth that was not offered, lay behind the first rejection, or was cut by EOS or budget was
not tested: it counts neither way. Choosing a width by past outcomes does not bias it, since a round
is censored before its own outcome.

Each estimate is shrunk to the next coarser one:

    request h[d]  ->  workload h[d]  ->  workload h[d-1]  ->  FIRST_DEPTH_PRIOR
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.contracts.shapes import MAX_WIDTH

MAX_DRAFTS = MAX_WIDTH - 1
FIRST_DEPTH_PRIOR = 0.6
"""Guess for depth 1 before anything was measured; decides little beyond the first rounds."""
WORKLOAD_STRENGTH = 4.0
REQUEST_STRENGTH = 4.0
"""Tests of a depth that weigh as much as the prior it is shrunk to."""
WORKLOAD_DECAY = 0.995
REQUEST_DECAY = 0.93
"""Weight of the past at each round that tested something: memories of about 200 and 14 rounds, so
that a request that turns from prose to copied text is followed within some dozen rounds."""
IDLE_DECAY = 0.985
"""Weight of a request's memory after a round that offered nothing: about 45 rounds half its
evidence, so that a request once found hopeless is judged by the workload again."""


@dataclass(slots=True)
class _Tests:
    """Decayed tests and passes by depth, depth 1 first."""

    tested: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFTS)
    passed: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFTS)

    def add(self, successes: int, failed: bool, decay: float) -> None:
        """Depths 1 .. successes passed; the next one failed, or was not tested.

        Only tested depths lose weight, so that a deep one seldom tested is remembered longer.
        """
        tested, passed = self.tested, self.passed
        for depth in range(successes + failed):
            tested[depth] = tested[depth] * decay + 1.0
            passed[depth] = passed[depth] * decay + (depth < successes)

    def fade(self, decay: float) -> None:
        """Weigh everything less."""
        self.tested = [count * decay for count in self.tested]
        self.passed = [count * decay for count in self.passed]


@dataclass(slots=True)
class _Request:
    """One request's tests, and expected[k] = tokens a round with k offered drafts emits."""

    tests: _Tests
    expected: tuple[float, ...]


class SurvivalEstimator:
    """Survival of every live request, and of the workload."""

    def __init__(self) -> None:
        self._workload = _Tests()
        self._requests: dict[int, _Request] = {}
        self._prior = self._workload_chances()

    def __len__(self) -> int:
        return len(self._requests)

    def expected_emitted(self, uid: int) -> tuple[float, ...]:
        """Entry k: 1 + survival[1] + .. + survival[k], for k = 0 .. 7."""
        request = self._requests.get(uid)
        if request is None:
            request = _Request(_Tests(), _expected(self._prior))
            self._requests[uid] = request
        return request.expected

    def observe(self, lanes: Iterable[LaneRecord]) -> None:
        """Learn from one round's records; dead and failed lanes teach nothing."""
        outcomes = [
            lane
            for lane in lanes
            if lane.status & Status.ACTIVE and not lane.status & Status.NONFINITE
        ]
        if any(lane.offered for lane in outcomes):
            self._workload.fade(WORKLOAD_DECAY)
            for lane in outcomes:
                self._workload.add(*_tested(lane), 1.0)
            self._prior = self._workload_chances()
        for lane in outcomes:
            request = self._requests.get(lane.uid)
            if request is None:
                request = self._requests[lane.uid] = _Request(_Tests(), ())
            if lane.offered:
                request.tests.add(*_tested(lane), REQUEST_DECAY)
            else:
                request.tests.fade(IDLE_DECAY)
            request.expected = self._request_expected(request.tests)

    def forget(self, uid: int) -> None:
        """Drop a request."""
        self._requests.pop(uid, None)

    def _workload_chances(self) -> tuple[float, ...]:
        chances = []
        prior = FIRST_DEPTH_PRIOR
        for tested, passed in zip(self._workload.tested, self._workload.passed, strict=True):
            prior = (passed + WORKLOAD_STRENGTH * prior) / (tested + WORKLOAD_STRENGTH)
            chances.append(prior)
        return tuple(chances)

    def _request_expected(self, tests: _Tests) -> tuple[float, ...]:
        return _expected(
            tuple(
                (passed + REQUEST_STRENGTH * prior) / (tested + REQUEST_STRENGTH)
                for tested, passed, prior in zip(
                    tests.tested, tests.passed, self._prior, strict=True
                )
            )
        )


def _tested(lane: LaneRecord) -> tuple[int, bool]:
    """Depths that passed, and whether the next one was tested and failed.

    In a clipped round the drafts that were committed passed; the next one's fate is not told.
    """
    clipped = lane.emitted <= lane.accepted
    return min(lane.accepted, lane.emitted), not clipped and lane.accepted < lane.offered


def _expected(chances: tuple[float, ...]) -> tuple[float, ...]:
    """1, then the running sum of the running product."""
    total, survival = 1.0, 1.0
    expected = [total]
    for chance in chances:
        survival *= chance
        total += survival
        expected.append(total)
    return tuple(expected)

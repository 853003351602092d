"""One width, wherever it was prepared (contract: G5)."""

from __future__ import annotations

from collections.abc import Sequence

from flare_ray.contracts.shapes import GraphShape
from flare_ray.controller.verification.policy import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    ProposalSource,
)
from flare_ray.errors import ContractViolation


class FixedPolicy:
    """Always `width` where the cohort's batch capacity has it, width one elsewhere."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._last: GraphShape | None = None

    def choose(self, cohort: Cohort, catalog: Sequence[GraphShape]) -> GraphShape:
        """The program of the fixed width if `catalog` has it, else its first, width one."""
        chosen = catalog[0]
        for shape in catalog:
            if shape.verify_width == self.width:
                chosen = shape
        self._last = chosen
        return chosen

    def decision(self) -> Decision:
        """The last choice; raises ContractViolation before the first."""
        if self._last is None:
            raise ContractViolation("a policy was asked to explain a choice it never made")
        return Decision(shape=self._last, reason="fixed")

    def observe(self, record: CompletedRound, cost_ns: int) -> None:
        """Nothing is learnt."""

    def expected_rate(self, lane: CohortLane) -> float:
        """Copies are taken for right and learned drafts for wrong, since nothing is learnt: the
        longest copy is the best."""
        copied = lane.sources[: lane.ceiling]
        return 1.0 + sum(source != ProposalSource.LEARNED for source in copied)

    def compared(self, uid: int, source: int, *, passed: int, failed: bool) -> None:
        """Nothing is learnt."""

    def forget(self, uid: int) -> None:
        """Nothing is kept."""

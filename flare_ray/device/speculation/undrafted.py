"""In place of a drafter where the checkpoint holds none: rounds verify copied tokens alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flare_ray.recipes.declaration import AbsorbRows, DraftSink, ProposalStart


class Undrafted:
    """See `flare_ray.recipes.declaration.Drafter`; it has no state and proposes nothing itself."""

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Nothing: no proposal follows from history."""

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Leave every depth to copies."""
        if start.depth:
            sink.copy(start.depth)

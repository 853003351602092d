"""Mask rows of a round, and what its drafts may still be once they are known (contract: K1, G5).

Rows of a lane, one per candidate position:

    row        0          1              ...  k                 k + 1 ...
    prefix     committed  + draft 0           + drafts 0 .. k-1
    mask       allowed at this prefix         draft k is forbidden: nothing behind it is verified

From the first forbidden draft on, the text that the grammar forces there takes the drafts' places,
if it forces one; those are copies with a point mass for q, so the emitted law stays exact (S1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals
from flare_ray.controller.grammar.matcher import GrammarMatcher, GrammarService, MaskFrame
from flare_ray.controller.live import LiveRequest
from flare_ray.errors import ContractViolation

if TYPE_CHECKING:
    from flare_ray.controller.grammar.matcher import MaskRows

OPEN_ROW = -1
"""Mask words of a row that allows every token."""


class MaskWriter:
    """Writes mask rows. Used by the controller's thread only.

    Attributes:
        service: whose blocks they are; None = no request is constrained.
        cut_drafts / forced_drafts: drafts that grammars forbade, and that they put in their places,
            since the start.
    """

    def __init__(self) -> None:
        self.service: GrammarService | None = None
        self.cut_drafts = 0
        self.forced_drafts = 0

    def open(self, round_id: int) -> OpenMasks:
        """Rows for a round that is being planned."""
        return OpenMasks(self.service, round_id)

    def answer(
        self, plan: RoundPlan, lanes: Sequence[LiveRequest], proposals: Proposals
    ) -> MaskAnswer:
        """Walk every constrained lane's drafts and write the rows behind them.

        Args:
            lanes: requests of the plan's lanes, in order; an ended one is walked like any other.
        """
        if self.service is None or len(proposals.drafts) != len(plan.lanes):
            raise ContractViolation(
                f"round {plan.round_id}: drafts of {len(proposals.drafts)} lanes at its barrier, "
                f"planned were {len(plan.lanes)}"
            )
        frame = self.service.frame(plan.round_id)
        limits: list[int] = []
        copies: list[tuple[int, ...]] = []
        for lane, live, drafts in zip(plan.lanes, lanes, proposals.drafts, strict=True):
            if lane.mask_row < 0 or live.matcher is None:
                limits.append(lane.ceiling)
                copies.append(())
                continue
            walk = walk_drafts(live.matcher, drafts[: lane.ceiling], frame.rows, lane.mask_row)
            limits.append(walk.limit)
            copies.append(walk.copies)
            self.cut_drafts += lane.ceiling - walk.kept
            self.forced_drafts += walk.limit - walk.kept
        used = tuple(copies) if any(copies) else ()
        return MaskAnswer(plan.round_id, tuple(limits), used)


class OpenMasks:
    """Rows of one plan under construction.

    Attributes:
        num_rows: rows handed out.
    """

    def __init__(self, service: GrammarService | None, round_id: int) -> None:
        self._service = service
        self._round_id = round_id
        self._frame: MaskFrame | None = None
        self.num_rows = 0

    @property
    def name(self) -> str:
        """The plan's mask block; "" if no row was handed out."""
        return self._frame.name if self._frame is not None else ""

    def take(self, live: LiveRequest, rows: int, *, filled: bool) -> int:
        """First of `rows` rows for `live`; -1 if it is unconstrained.

        Args:
            filled: write row 0 now, as nothing will be known later.
        """
        if live.matcher is None:
            return -1
        if self._frame is None:
            if self._service is None:
                raise ContractViolation("a constrained request in an engine without grammars")
            self._frame = self._service.frame(self._round_id)
        first = self.num_rows
        self.num_rows += rows
        if filled:
            live.matcher.fill_mask(self._frame.rows, first)
        return first


class Walk:
    """Outcome of one lane's walk.

    Attributes:
        kept: drafts that stand, from the start.
        limit: drafts to verify, forced ones included.
        copies: as in `MaskAnswer`.
    """

    __slots__ = ("copies", "kept", "limit")

    def __init__(self, kept: int, forced: Sequence[int]) -> None:
        self.kept = kept
        self.limit = kept + len(forced)
        self.copies: tuple[int, ...] = (*[-1] * kept, *forced) if forced else ()


def walk_drafts(matcher: GrammarMatcher, drafts: Sequence[int], rows: MaskRows, first: int) -> Walk:
    """Write the mask behind every prefix of `drafts` and find the first forbidden one.

    The matcher stands where it stood afterwards. Behind a terminal token nothing is emitted, so its
    row allows everything and the walk ends.

    Args:
        rows: [rows, words] int32; rows first .. first + len(drafts) at most are written.
    """
    steps = kept = 0
    forced: list[int] = []
    todo = list(drafts)
    matcher.fill_mask(rows, first)
    while steps < len(todo):
        if not matcher.try_token(todo[steps]):
            if forced:
                break
            kept = steps
            forced = list(matcher.forced_tokens()[: len(todo) - steps])
            if not forced:
                break
            todo = [*todo[:steps], *forced]
            continue
        steps += 1
        if matcher.has_ended:
            rows[first + steps] = OPEN_ROW
            break
        matcher.fill_mask(rows, first + steps)
    matcher.undo(steps)
    return Walk(kept, todo[kept:steps]) if forced else Walk(steps, ())

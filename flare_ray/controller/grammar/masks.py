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
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Proposals
from flare_ray.controller.grammar.limited import LimitedThread
from flare_ray.controller.grammar.matcher import GrammarMatcher, GrammarService, MaskFrame
from flare_ray.controller.live import LiveRequest, Phase
from flare_ray.errors import ContractViolation

if TYPE_CHECKING:
    from flare_ray.controller.grammar.matcher import MaskRows

OPEN_ROW = -1
"""Mask words of a row that allows every token."""
WALK_LIMIT_S = 0.1
"""Processor time of one lane's walk, as long as some ten rounds; usual ones take 20 us to 5 ms."""


class MaskWriter:
    """Writes mask rows. Used by the controller's thread only.

    Matchers are used nowhere else, and only within a limit of time: a request whose grammar takes
    longer gets open rows, which nobody looks at any more, and is handed out by `take_slow`.

    Attributes:
        service: whose blocks they are; None = no request is constrained.
        cut_drafts / forced_drafts: drafts that grammars forbade, and that they put in their places,
            since the start.
    """

    def __init__(self) -> None:
        self.service: GrammarService | None = None
        self.cut_drafts = 0
        self.forced_drafts = 0
        self._thread = LimitedThread(WALK_LIMIT_S, name="flare-masks")
        self._scratch: MaskRows = np.empty((0, 0), np.int32)
        self._slow: list[LiveRequest] = []

    @property
    def num_stuck(self) -> int:
        """Matchers that were given up on and are still at work."""
        return self._thread.num_stuck

    def open(self, round_id: int) -> OpenMasks:
        """Rows for a round that is being planned."""
        return OpenMasks(self, round_id)

    def answer(
        self, plan: RoundPlan, lanes: Sequence[LiveRequest], proposals: Proposals
    ) -> MaskAnswer:
        """Walk every constrained lane's drafts and write the rows behind them.

        Args:
            lanes: requests of the plan's lanes, in order; an ended one gets no drafts.
        """
        if self.service is None or len(proposals.drafts) != len(plan.lanes):
            raise ContractViolation(
                f"round {plan.round_id}: drafts of {len(proposals.drafts)} lanes at its barrier, "
                f"planned were {len(plan.lanes)}"
            )
        frame = self.service.frame(plan.round_id)
        drafts = {
            place: proposals.drafts[place][: lane.ceiling]
            for place, lane in enumerate(plan.lanes)
            if lane.mask_row >= 0
        }
        found = self._walks(
            [(lanes[place], drafts[place], plan.lanes[place].mask_row) for place in drafts],
            frame.rows,
        )
        walks = dict(zip(drafts, found, strict=True))
        limits = [
            walks[place].limit if place in walks else lane.ceiling
            for place, lane in enumerate(plan.lanes)
        ]
        copies = [walks[place].copies if place in walks else () for place in range(len(limits))]
        for place, walk in walks.items():
            self.cut_drafts += plan.lanes[place].ceiling - walk.kept
            self.forced_drafts += walk.limit - walk.kept
        return MaskAnswer(plan.round_id, tuple(limits), tuple(copies) if any(copies) else ())

    def fill(self, live: LiveRequest, rows: MaskRows, row: int) -> None:
        """Write the mask of what may follow the committed tokens of `live`."""
        self._walks([(live, (), row)], rows)

    def can_end(self, live: LiveRequest) -> bool:
        """Whether the committed tokens of `live` are a whole output."""
        matcher = live.matcher
        if matcher is None:
            return False
        (found,) = self._thread.run([partial(_can_end, matcher, live.take_owed())])
        return bool(found)

    def settle(self, live: LiveRequest) -> None:
        """Hold the last tokens of a request that ends against its grammar.

        Raises:
            ContractViolation: one of them is forbidden.
        """
        if live.matcher is not None:
            self._thread.run([partial(_commit, live.matcher, live.take_owed())])

    def take_slow(self) -> Sequence[LiveRequest]:
        """Requests to be ended since their matchers took too long, once each; theirs may still be
        at work. Their grammars are refused from now on."""
        slow, self._slow = self._slow, []
        return slow

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _walks(
        self, asked: Sequence[tuple[LiveRequest, Sequence[int], int]], rows: MaskRows
    ) -> list[Walk]:
        """One per (request, drafts, first row).

        They write into rows of their own: whatever a walk that was given up on writes later must
        not reach another round.
        """
        if self._scratch.shape != rows.shape:
            self._scratch = np.empty_like(rows)
        scratch = self._scratch
        alive = [one for one in asked if one[0].phase is not Phase.ENDED]
        works = [
            partial(_walk, live.matcher, live.take_owed(), drafts, scratch, first)
            for live, drafts, first in alive
            if live.matcher is not None
        ]
        outcomes = iter(self._thread.run(works))
        walks = []
        for live, drafts, first in asked:
            walk = next(outcomes) if live.phase is not Phase.ENDED else None
            behind = first + len(drafts) + 1
            rows[first:behind] = OPEN_ROW if walk is None else scratch[first:behind]
            if walk is None and live.phase is not Phase.ENDED:
                self._slow.append(live)
                self._scratch = np.empty((0, 0), np.int32)
            walks.append(walk or Walk(0, ()))
        return walks


class OpenMasks:
    """Rows of one plan under construction.

    Attributes:
        num_rows: rows handed out.
    """

    def __init__(self, writer: MaskWriter, round_id: int) -> None:
        self._writer = writer
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
            service = self._writer.service
            if service is None:
                raise ContractViolation("a constrained request in an engine without grammars")
            self._frame = service.frame(self._round_id)
        first = self.num_rows
        self.num_rows += rows
        if filled:
            self._writer.fill(live, self._frame.rows, first)
        return first


def _walk(
    matcher: GrammarMatcher,
    owed: Sequence[int],
    drafts: Sequence[int],
    rows: MaskRows,
    first: int,
) -> Walk:
    _commit(matcher, owed)
    return walk_drafts(matcher, drafts, rows, first)


def _can_end(matcher: GrammarMatcher, owed: Sequence[int]) -> bool:
    _commit(matcher, owed)
    return matcher.can_end


def _commit(matcher: GrammarMatcher, owed: Sequence[int]) -> None:
    for token in owed:
        matcher.commit(token)


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

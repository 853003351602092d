"""What a rank's host knows about its snapshot rows, and the check of saves and restores against it
(contract: M4).

Split from the slots' ledger, which calls it: a row that was never written, that stands for another
number of tokens, or that stems from the other program family must not reach a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import RoundPlan, SlotRestore, SnapshotSave
from flare_ray.contracts.tiers import TierMove, TierOrder
from flare_ray.device.state.layout import pages_for
from flare_ray.errors import ContractViolation


class SlotFacts(Protocol):
    """The part of a slot's view that snapshots depend on."""

    epoch: int
    consumed: int
    published: int
    speculation: bool | None


@dataclass(frozen=True, slots=True)
class RowView:
    """consumed: tokens a row stands for; speculation: it holds drafter history."""

    consumed: int
    speculation: bool


class SnapshotLedger:
    """Snapshot rows of one rank."""

    def __init__(self, manifest: PreparedManifest) -> None:
        self._num_pages = manifest.num_pages
        self._rows: list[RowView | None] = [None] * manifest.snapshot_rows

    def problems(self, plan: RoundPlan, slots: Sequence[SlotFacts]) -> Iterator[str]:
        """What is wrong with a plan's saves, restores and captures.

        Args:
            slots: views before the plan.
        """
        ahead: dict[int, RowView | None] = {}
        for save in plan.saves:
            problem = self._save_problem(save, slots)
            if problem:
                yield f"save of slot {save.slot} to row {save.row}: {problem}"
            else:
                ahead[save.row] = _saved(save, slots)
        owners = {init.slot: init.epoch for init in plan.inits}
        for restore in plan.restores:
            problem = self._restore_problem(restore, plan, owners, ahead)
            if problem:
                yield f"restore of slot {restore.slot} from row {restore.row}: {problem}"
        ends = {(lane.slot, lane.epoch): lane.start + len(lane.tokens) for lane in plan.prefill}
        for capture in plan.captures:
            end = ends.get((capture.slot, capture.epoch))
            if not self._is_row(capture.row) or end != capture.consumed:
                yield (
                    f"capture of slot {capture.slot} in row {capture.row} after "
                    f"{capture.consumed} tokens: the plan's chunk ends at {end}, "
                    f"{len(self._rows)} rows were prepared"
                )

    def apply_saves(self, saves: Sequence[SnapshotSave], slots: Sequence[SlotFacts]) -> None:
        """Note checked saves; before the plan's hand-overs."""
        for save in saves:
            self._rows[save.row] = _saved(save, slots)

    def complete(self, captures: Sequence[SnapshotSave], slots: Sequence[SlotFacts]) -> None:
        """Note captures; a chunk that did not run leaves a row that nobody may restore."""
        for save in captures:
            view = slots[save.slot]
            there = view.epoch == save.epoch and view.consumed == save.consumed
            self._rows[save.row] = _saved(save, slots) if there else None

    def check_order(self, order: TierOrder, slots: Sequence[SlotFacts]) -> None:
        """Refuse a move between a row and the host that cannot be right.

        Raises:
            ContractViolation: a save of the order, its row, its tokens or its pages.
        """
        problems = [
            f"save of slot {save.slot} to row {save.row}: {text}"
            for save in order.saves
            if (text := self._save_problem(save, slots))
        ]
        if not problems and order.move in (TierMove.STORE, TierMove.LOAD):
            problems += self._move_problems(order, slots)
        if problems:
            raise ContractViolation(f"tier order {order.ticket}: {'; '.join(problems)}")

    def begin_load(self, order: TierOrder) -> None:
        """A row is about to be overwritten: nothing may be restored from it."""
        self._rows[order.row] = None

    def loaded(self, order: TierOrder) -> None:
        """A row holds the snapshot of an order now; called by the thread that copied it, before
        the controller can know."""
        self._rows[order.row] = RowView(order.tokens, order.speculation)

    def _move_problems(self, order: TierOrder, slots: Sequence[SlotFacts]) -> Iterator[str]:
        if not self._is_row(order.row):
            yield f"row {order.row}, {len(self._rows)} were prepared"
            return
        if len(order.pages) != pages_for(order.tokens) or not order.tokens:
            yield f"{len(order.pages)} pages for {order.tokens} tokens"
        if not all(0 < page < self._num_pages for page in order.pages):
            yield f"pages {order.pages} outside 1..{self._num_pages - 1}"
        view = self._rows[order.row]
        for save in order.saves:
            view = _saved(save, slots) if save.row == order.row else view
        expected = RowView(order.tokens, order.speculation)
        if order.move is TierMove.STORE and view != expected:
            yield f"row {order.row} holds {view}, expected {expected}"

    def _is_row(self, row: int) -> bool:
        return 0 <= row < len(self._rows)

    def _save_problem(self, save: SnapshotSave, slots: Sequence[SlotFacts]) -> str:
        if not self._is_row(save.row) or not 0 <= save.slot < len(slots):
            return f"no such row or slot, {len(self._rows)} rows and {len(slots)} slots exist"
        view = slots[save.slot]
        if view.epoch != save.epoch:
            return f"the slot is at epoch {view.epoch}, planned was {save.epoch}"
        held = view.consumed if save.live else view.published
        if held != save.consumed or not held:
            where = "slot" if save.live else "publication row"
            return f"the {where} holds {held} tokens, planned were {save.consumed}"
        return ""

    def _restore_problem(
        self,
        restore: SlotRestore,
        plan: RoundPlan,
        owners: Mapping[int, int],
        ahead: Mapping[int, RowView | None],
    ) -> str:
        if not self._is_row(restore.row):
            return f"no such row, {len(self._rows)} were prepared"
        if owners.get(restore.slot) != restore.epoch:
            return f"epoch {restore.epoch} is not handed over by the same plan"
        view = ahead.get(restore.row, self._rows[restore.row])
        if view is None or view.consumed != restore.consumed:
            return f"the row holds {view}, planned were {restore.consumed} tokens"
        if view.speculation != plan.shape.speculation:
            return f"the row's drafter history is {view.speculation}, the plan is of the other kind"
        pages = (restore.source_page, restore.target_page)
        if not all(0 < page < self._num_pages for page in pages):
            return f"pages {pages} outside 1..{self._num_pages - 1}"
        return ""


def _saved(save: SnapshotSave, slots: Sequence[SlotFacts]) -> RowView:
    return RowView(save.consumed, bool(slots[save.slot].speculation))

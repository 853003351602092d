"""All persistent state of one rank: allocation, slot hand-over, page grants, integrity.

Programs read and write the tensors; the host only hands slots over and grants pages, in stream
order. Nothing here is allocated after construction (contract: G4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.contracts.plan import PageGrant, SlotInit, SlotRestore, SnapshotSave
from flare_ray.contracts.shapes import MAX_WIDTH
from flare_ray.device.state.layout import (
    Allocation,
    Core,
    Phase,
    StateLimits,
    active_groups,
    allocations,
)
from flare_ray.device.state.logits import LogitState
from flare_ray.device.state.publication import Publication
from flare_ray.device.state.request import RequestState
from flare_ray.device.state.snapshots import SnapshotRows
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import StateGroup, StateSpec

TORCH_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


class StateStore:
    """Owner of every state tensor of a rank.

    Attributes:
        spec: what was allocated.
        groups: group name -> tensor, what targets and drafters receive as `state`.
        request: request slots.
        publication: publication rows, None unless prepared.
        snapshots: prefix snapshots, None unless prepared.
        page_bytes / state_bytes: exact sizes, equal to `layout.state_bytes`.
    """

    def __init__(self, spec: StateSpec, limits: StateLimits) -> None:
        self.limits = limits
        self.spec = spec
        self.spec_groups = active_groups(spec, limits)
        plan = allocations(spec, limits)
        made = {(a.owner, a.name): self._allocate(a) for a in plan}
        self.groups: dict[str, Tensor] = {
            name: tensor for (owner, name), tensor in made.items() if owner in ("page", "group")
        }
        self.request = RequestState(
            core=made["request", "core"],
            sampling=made["request", "sampling"],
            page_table=made["request", "page_table"],
            tail=made.get(("request", "tail")),
            sampling_vector=made.get(("request", "sampling_vector")),
            logits=LogitState(
                counts=made["request", "token_counts"],
                rules=made["request", "rules"],
                addends=made["request", "rule_addends"],
                bad_words=made["request", "bad_words"],
                recent=made["request", "recent"],
                generated_from=made["request", "generated_from"],
            ),
        )
        published = {name: t for (owner, name), t in made.items() if owner == "publication"}
        self.publication = Publication(self.spec_groups, published) if published else None
        rows = {name: t for (owner, name), t in made.items() if owner == "snapshot"}
        self.snapshots = SnapshotRows(self.spec_groups, rows) if rows else None
        self.page_bytes = sum(a.num_bytes for a in plan if a.owner == "page")
        self.state_bytes = sum(t.nbytes for t in made.values()) - self.page_bytes

    def _allocate(self, allocation: Allocation) -> Tensor:
        # Written, so that it is resident from the start: zeros on CPU would be mapped page by page
        # as requests reach them, and a host without the memory would fail in mid-service.
        return torch.empty(
            allocation.shape,
            dtype=TORCH_DTYPE[allocation.dtype],
            device=self.limits.device,
        ).zero_()

    def init_slot(self, init: SlotInit) -> None:
        """Give a slot to a request: its state rows become those of an empty history.

        Of a column group only column 0 is cleared: it is the live one of a fresh slot, and every
        other column is written by the row that makes it live.
        """
        self.request.init_slot(init)
        live = [self._fresh_rows(group, init.slot) for group in self.spec_groups]
        if rows := [r for r in live if r is not None]:  # pages need no clearing
            torch._foreach_zero_(rows)
        if self.publication is not None:
            self.publication.forget(init.slot)

    def _fresh_rows(self, group: StateGroup, slot: int) -> Tensor | None:
        if group.kind == "page":
            return None
        tensor = self.groups[group.name]
        return tensor[slot, 0] if group.kind in ("column", "record") else tensor[slot]

    def grant(self, grant: PageGrant) -> None:
        """Write page ids into a slot's table."""
        self.request.grant(grant)

    def save(self, save: SnapshotSave) -> None:
        """Copy a slot's present state, or its publication row, into a snapshot row.

        Raises:
            ContractViolation: no snapshot rows were prepared.
        """
        if self.snapshots is None or self.publication is None:
            raise ContractViolation("a snapshot was planned, none were prepared")
        if save.live:
            self.snapshots.save_live(save.row, save.slot, self.groups, self.request)
        else:
            self.snapshots.save_published(save.row, save.slot, self.publication)

    def restore(self, restore: SlotRestore, *, keeps_pairs: bool) -> None:
        """Continue a fresh slot from a snapshot row; copies the page that it will write into.

        Args:
            keeps_pairs: the row came from programs that keep drafter history.
        Raises:
            ContractViolation: no snapshot rows were prepared.
        """
        if self.snapshots is None:
            raise ContractViolation("a restore was planned, no snapshots were prepared")
        self.snapshots.restore(restore.row, restore.slot, self.groups, self.request)
        core = self.request.core[restore.slot]
        core[Core.CONSUMED] = restore.consumed
        core[Core.DRAFT_POSITION] = self.spec.absorbed(restore.consumed) if keeps_pairs else 0
        for group in self.spec_groups:
            if group.kind == "page":
                pages = self.groups[group.name]
                pages[restore.target_page].copy_(pages[restore.source_page])

    def check_integrity(self) -> None:
        """Compare every slot with the invariants of its fields; synchronises, for tests and debug.

        Raises:
            ContractViolation: names the slot, field and value.
        """
        problems = list(self._null_problems())
        for slot, row in enumerate(self.request.core[:-1].tolist()):
            problems += [f"slot {slot}: {text}" for text in self._slot_problems(row)]
        table = self.request.page_table
        if int(table.min()) < 0 or int(table.max()) >= self.limits.num_pages:
            problems.append(f"page table holds ids outside 0..{self.limits.num_pages - 1}")
        if problems:
            raise ContractViolation("request state is damaged: " + "; ".join(problems))

    def _null_problems(self) -> list[str]:
        request = self.request
        if bool(request.core[-1].any()) or bool(request.page_table[-1].any()):
            return ["the null slot was written: a lane without a transition changed state"]
        return []

    def _slot_problems(self, row: list[int]) -> list[str]:
        phase, consumed, column = row[Core.PHASE], row[Core.CONSUMED], row[Core.COLUMN]
        problems = []
        if phase not in tuple(Phase):
            problems.append(f"phase {phase}")
        if not 0 <= consumed <= self.limits.context_tokens:
            problems.append(f"consumed {consumed} outside 0..{self.limits.context_tokens}")
        if not 0 <= column < MAX_WIDTH:
            problems.append(f"column {column} outside 0..{MAX_WIDTH - 1}")
        if row[Core.GENERATED] < 0 or row[Core.BUDGET] < 0:
            problems.append(f"generated {row[Core.GENERATED]}, budget {row[Core.BUDGET]}")
        if phase == Phase.READY and (row[Core.BUDGET] < 1 or consumed < 1 or row[Core.PENDING] < 0):
            problems.append(
                f"ready with budget {row[Core.BUDGET]}, consumed {consumed}, pending "
                f"{row[Core.PENDING]}"
            )
        # contract R8; an ordinary program keeps no pairs
        if row[Core.DRAFT_POSITION] not in (0, self.spec.absorbed(consumed)):
            problems.append(f"{row[Core.DRAFT_POSITION]} absorbed rows for {consumed} consumed")
        return problems

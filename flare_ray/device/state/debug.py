"""Debugging aids of the state: overwriting what nobody holds, and comparing state with the ledger.

Not part of any program: the host calls them between programs, and comparing synchronises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flare_ray.contracts.plan import FreedMemory
from flare_ray.device.state.layout import Core, Phase, Published
from flare_ray.device.state.ledger import SlotLedger
from flare_ray.device.state.store import StateStore

POISON = -(1 << 30)
"""Fills freed integers: no token, position or count; in range of int32."""


def poison(store: StateStore, freed: FreedMemory) -> None:
    """Overwrite freed pages, snapshot rows and slots: NaN in floating point, POISON in integers.

    A slot's request state keeps its identity and phase, by which late lanes are told apart.
    """
    request, publication, snapshots = store.request, store.publication, store.snapshots
    for group in store.spec_groups:
        tensor = store.groups[group.name]
        _fill(tensor, freed.pages if group.kind == "page" else freed.slots)
    for kept, which in ((publication, freed.slots), (snapshots, freed.rows)):
        if kept is not None:
            for tensor in (*kept.rows.values(), kept.tail, kept.sampling_vector):
                _fill(tensor, which)
    logits = request.logits
    for row in (logits.counts, logits.recent, logits.addends):
        _fill(row, freed.slots)
    _fill(request.tail, freed.slots)
    _fill(request.sampling_vector, freed.slots)


def _fill(tensor: Tensor | None, rows: Sequence[int]) -> None:
    if tensor is not None and rows:
        value = float("nan") if tensor.dtype.is_floating_point else POISON
        index = torch.tensor(rows, dtype=torch.int64, device=tensor.device)
        tensor.index_fill_(0, index, value)


def ledger_problems(ledger: SlotLedger, store: StateStore) -> Iterator[str]:
    """Differences between what the host believes of each slot and what the slot holds.

    The ledger follows completed records, so this holds between programs only.
    """
    request = store.request
    core = request.core[:-1].tolist()
    table = request.page_table[:-1].tolist()
    rows = store.publication.published[:-1].tolist() if store.publication is not None else None
    for slot, row in enumerate(core):
        view = ledger.view(slot)
        if view.epoch < 0:
            continue
        own = [page for page in table[slot] if page]
        held = {
            "epoch": (row[Core.EPOCH], view.epoch),
            "consumed tokens": (row[Core.CONSUMED], view.consumed),
            "budget": (row[Core.BUDGET], view.budget),
            "pages": (len(own), view.pages),
            "ended": (row[Core.PHASE] == Phase.ENDED, view.ended),
        }
        for what, (ours, theirs) in held.items():
            if ours != theirs:
                yield f"slot {slot}: {what} {ours}, the ledger says {theirs}"
        if len(set(own)) != len(own):
            yield f"slot {slot}: a page stands in two entries of its table"
        if rows is not None and view.published:
            published = (rows[slot][Published.EPOCH], rows[slot][Published.CONSUMED])
            if published != (view.epoch, view.published):
                yield (
                    f"slot {slot}: the publication row is that of {published}, the ledger says "
                    f"{(view.epoch, view.published)}"
                )

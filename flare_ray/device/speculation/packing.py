"""Packed rounds: P target rows shared by B lanes, prefixes assigned by the drafter's own forecast
(contract: G3, C4).

    survival[b, i] = product of the forecasts of drafts 0 .. i of lane b
    every active lane has its pending token's row; the P - active largest survivals get the others

The law stays exact because a draft's own value never decides whether it is offered: forecast i is
known before draft i is drawn, P is fixed before the round, and survival only falls along a lane, so
what a draft changes are later places of its own lane and other lanes' shares. Equal survivals go to
the lower lane, then to the earlier draft, which keeps prefixes whole.

The target sees P lanes of one row, several of one slot; a recipe that declares forecasts promises
that its target writes all rows of a pass before it reads any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flare_ray.device.state.store import StateStore
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import Rows, Target, TargetOutput


def assigned_prefixes(
    forecasts: Sequence[Tensor], room: Tensor, active: Tensor, *, capacity: int
) -> Tensor:
    """Drafts each lane offers.

    Args:
        forecasts: by depth, [B] float32 in 0 .. 1.
        room: [B] int64, most drafts of each lane.
        active: [B] bool.
        capacity: P, rows of all lanes together, more than B.
    Returns:
        [B] int64, at most `room`, 0 for inactive lanes; with the active lanes' own rows the sum is
        at most P.
    Raises:
        ContractViolation: the drafter made no forecast.
    """
    if not forecasts:
        raise ContractViolation("a packed round was prepared for a drafter without forecasts")
    survival = torch.stack(tuple(forecasts), dim=1).clamp(0.0, 1.0).cumprod(1)
    depth = torch.arange(survival.shape[1], device=room.device)
    open_places = (depth < room.unsqueeze(1)) & active.unsqueeze(1)
    # what is no number must not rank above a number
    survival = torch.where(open_places & ~survival.isnan(), survival, -1.0)
    order = torch.sort(survival.view(-1), descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=order.device)
    free = capacity - active.sum()
    taken = (rank.view_as(survival) < free) & (survival >= 0)
    return taken.sum(1)


def packed_forward(target: Target, rows: Rows, store: StateStore, *, capacity: int) -> TargetOutput:
    """A round's rows as `capacity` lanes of one row.

    Args:
        rows: [B, W]; at most `capacity` of them valid.
    Returns:
        [B, W, ...] each; what stands at rows that are not valid has no meaning.
    """
    batch, width = rows.tokens.shape
    valid = rows.valid.reshape(-1)
    order = torch.sort((~valid).to(torch.int8), stable=True).indices[:capacity]
    lane, taken = order // width, valid.index_select(0, order)
    packed = Rows(
        tokens=rows.tokens.reshape(-1).index_select(0, order).unsqueeze(1),
        slots=torch.where(taken, rows.slots.index_select(0, lane), store.request.null_slot),
        positions=rows.positions.reshape(-1).index_select(0, order).unsqueeze(1),
        valid=taken.unsqueeze(1),
        lengths=taken.to(torch.int64),
        column=torch.zeros_like(lane),
        page_table=rows.page_table.index_select(0, lane),
        last_only=False,
        prefill=False,
    )
    output = target.forward(packed, store.groups)
    place = (valid.cumsum(0) - 1).clamp_(0, capacity - 1)

    def spread(value: Tensor) -> Tensor:
        return value.flatten(0, 1).index_select(0, place).unflatten(0, (batch, width))

    return TargetOutput(spread(output.logits), spread(output.feedback), spread(output.sampling))

"""The compact form of a round's states: what each row added, replayed up to the accepted one
(contract: M2).

A row turns S into decay * S + k d^T. Its normalised key k, correction d and decay are a hundredth
of S, and they depend on earlier rows only: the state after row j is S before the round, with
records 0 .. j applied in order. Nothing is stored per row but that, and nothing is done at commit:
the next program replays as many records as were accepted, then records its own rows.

The compiled replay rounds every operation as the recorded pass did, so it gives the bits of that
pass. A record of decay 1 and zeros leaves every state as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape


@dataclass(slots=True)
class Records:
    """corrections [S + 1, 8, Hv, dv], keys [S + 1, 8, Hk, dk], decays [S + 1, 8, Hv], float32."""

    corrections: Tensor
    keys: Tensor
    decays: Tensor


def replayed(base: Tensor, records: Records, slots: Tensor, counts: Tensor) -> Tensor:
    """States after the first records of some slots.

    Args:
        base: [S + 1, Hv, dk, dv] float32, states before them.
        slots: [R] int64.
        counts: [R] int64 records to apply, 0 to 8.
    Returns:
        [R, Hv, dk, dv].
    Raises:
        ContractViolation: shapes disagree.
    """
    _check(base, records, slots, counts)
    if _compiles(base):
        from flare_ray.device.ops.gated_delta import numba

        out = torch.empty((slots.shape[0], *base.shape[1:]))
        numba.replay(base, records, slots, counts, out=out)
        return out
    return _replayed(base, records, slots, counts)


def settle(base: Tensor, records: Records, slots: Tensor, counts: Tensor) -> None:
    """As `replayed`, in place: base[slots] becomes what was asked for."""
    _check(base, records, slots, counts)
    if _compiles(base):
        from flare_ray.device.ops.gated_delta import numba

        numba.replay(base, records, slots, counts, out=None)
    else:
        base.index_copy_(0, slots, _replayed(base, records, slots, counts))


def forget(records: Records, slots: Tensor) -> None:
    """Put a record that does nothing into entry 0 of some slots [R]."""
    for tensor, value in ((records.corrections, 0.0), (records.keys, 0.0), (records.decays, 1.0)):
        tensor[:, 0].index_fill_(0, slots, value)


def _replayed(base: Tensor, records: Records, slots: Tensor, counts: Tensor) -> Tensor:
    state = base.index_select(0, slots)
    corrections, keys, decays = (
        tensor.index_select(0, slots)
        for tensor in (records.corrections, records.keys, records.decays)
    )
    keys = keys.repeat_interleave(base.shape[1] // keys.shape[2], 2)
    for entry in range(corrections.shape[1]):
        added = keys[:, entry].unsqueeze(-1) * corrections[:, entry].unsqueeze(-2)
        after = state * decays[:, entry, :, None, None] + added
        state = torch.where((counts > entry).view(-1, 1, 1, 1), after, state)
    return state


def _check(base: Tensor, records: Records, slots: Tensor, counts: Tensor) -> None:
    rows, heads, keys, values = base.shape
    entries, shared = records.keys.shape[1:3]
    expect_shape("corrections", records.corrections, rows, entries, heads, values)
    expect_shape("keys", records.keys, rows, entries, shared, keys)
    expect_shape("decays", records.decays, rows, entries, heads)
    expect_shape("counts", counts, slots.shape[0])


def _compiles(base: Tensor) -> bool:
    return base.device.type == "cpu" and base.is_contiguous()

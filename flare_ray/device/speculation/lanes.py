"""The lanes of a program as the device sees them: plan inputs joined with request state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.sampling.coupled import Coupling
from flare_ray.device.sampling.filters import FilterParams
from flare_ray.device.sampling.philox import uniforms
from flare_ray.device.speculation.inputs import FilterBounds, HostFacts
from flare_ray.device.state.layout import EOS, KEYS, Core, Phase, Sampling
from flare_ray.device.state.request import RequestState
from flare_ray.rng import OFFSET_STRIDE, RngDomain

DEVICE_DOMAINS = RngDomain.EXPLORE.value
"""DRAFT, ACCEPT and SAMPLE come first; EXPLORE and what follows belong to the controller."""


@dataclass(slots=True)
class Lanes:
    """Lanes of one execution.

    A lane is inactive when it is padded, its epoch is stale, or its slot is not in the phase that
    the program runs; it then carries the null slot, the null page and zeros (contract: T4, T6).

    Attributes:
        active: [B] bool.
        slots: [B] int64, the null slot where inactive.
        epoch: [B] int64, as planned.
        core: [B, CORE_FIELDS] int64, zero where inactive.
        fields: the first columns of `core`, [B] each.
        params: sampling parameters, [B] each.
        page_table: [B, C] int64.
        coupled: [B] bool, lanes of the reproducible mode; None where the host knows of none.
        all_coupled: static: the host knows that no lane draws otherwise.
    """

    active: Tensor
    slots: Tensor
    epoch: Tensor
    core: Tensor
    fields: tuple[Tensor, ...]
    params: FilterParams
    page_table: Tensor
    coupled: Tensor | None = None
    all_coupled: bool = False

    def field(self, name: Core) -> Tensor:
        """[B] int64, one field of the lanes' request state; KEYS and EOS are read from `core`."""
        return self.fields[name]

    @property
    def eos_ids(self) -> Tensor:
        """[B, 16] int64."""
        return self.core[:, EOS]


@dataclass(slots=True)
class Planned:
    """What a plan asks of its lanes: slots, epochs, and the start of a prompt chunk; [B] int64.

    `start` is None in a round, where the device alone knows how far a lane is.
    """

    slots: Tensor
    epoch: Tensor
    start: Tensor | None = None


def open_lanes(request: RequestState, planned: Planned, phase: Phase, facts: HostFacts) -> Lanes:
    """Join planned lanes with their slots' state.

    Args:
        phase: what a slot must be for its lane to run.
    """
    core = request.core.index_select(0, planned.slots)
    active = (core[:, Core.EPOCH] == planned.epoch) & (core[:, Core.PHASE] == phase.value)
    if planned.start is not None:
        active &= core[:, Core.CONSUMED] == planned.start
    slots = torch.where(active, planned.slots, request.null_slot)
    core.mul_(active.unsqueeze(1))
    fields = core[:, : Core.KEYS].unbind(1)
    sampling = request.sampling.index_select(0, slots)
    bounds: FilterBounds = facts.filters
    params = FilterParams(
        temperature=sampling[:, Sampling.TEMPERATURE],
        top_k=fields[Core.TOP_K],
        top_p=sampling[:, Sampling.TOP_P],
        min_p=sampling[:, Sampling.MIN_P],
        max_top_k=bounds.max_top_k,
        every_lane_greedy=bounds.every_lane_greedy,
        any_top_p=bounds.any_top_p,
        any_min_p=bounds.any_min_p,
    )
    table = request.page_table[:, : facts.context_pages].index_select(0, slots)
    coupled = sampling[:, Sampling.COUPLED] > 0 if bounds.any_coupled else None
    return Lanes(
        *(active, slots, planned.epoch, core, fields, params, table, coupled),
        all_coupled=bounds.every_lane_coupled,
    )


@dataclass(slots=True)
class Draws:
    """Uniforms of one round: draft [B, D], accept [B, D + 2], sample [B, 1], each float32.

    coupling: of the lanes that draw by position instead; None where there are none.
    """

    draft: Tensor
    accept: Tensor
    sample: Tensor
    coupling: Coupling | None = None


def coupling_of(lanes: Lanes, first: Tensor) -> Coupling | None:
    """The position-keyed draws of lanes whose first row has position `first` [B]."""
    if lanes.coupled is None:
        return None
    keys = lanes.core[:, KEYS][:, RngDomain.SAMPLE]
    return Coupling(lanes.coupled, keys, first, lanes.all_coupled)


def round_draws(lanes: Lanes, depth: int) -> Draws:
    """All uniforms a round may use, from draw 12 N of each domain in one call (contract: S5)."""
    offset = lanes.field(Core.CONSUMED) * OFFSET_STRIDE
    keys = lanes.core[:, KEYS]
    coupling = coupling_of(lanes, lanes.field(Core.CONSUMED))
    if depth == 0:
        none = keys.new_zeros((0,), dtype=torch.float32)
        return Draws(none, none, uniforms(keys[:, RngDomain.SAMPLE], offset, 1), coupling)
    keys = keys[:, :DEVICE_DOMAINS].reshape(-1)
    offsets = offset.unsqueeze(1).expand(-1, DEVICE_DOMAINS).reshape(-1)
    drawn = uniforms(keys, offsets, depth + 2).view(-1, DEVICE_DOMAINS, depth + 2)
    return Draws(
        drawn[:, RngDomain.DRAFT, :depth],
        drawn[:, RngDomain.ACCEPT],
        drawn[:, RngDomain.SAMPLE],
        coupling,
    )

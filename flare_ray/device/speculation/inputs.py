"""Static inputs of a program and the facts the host fixes about one execution.

A plan becomes one or two copies: the lanes' integers with a prefill's tokens, and the mask rows if
any lane is constrained. On CPU the host array and the tensor share memory; on CUDA two page-locked
arrays take turns in front of each tensor.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.plan import LanePlan, MaskAnswer, RoundPlan
from flare_ray.device.ops.ahead.api import shapes_alone

ABSENT = -1
STAGING_SETS = 2
"""Host copies of every input: rounds that may be queued (contract: T6)."""


class LaneField(enum.IntEnum):
    """Column of each int64 input of a round's lane; copy tokens follow from COPIES on."""

    SLOT = 0
    EPOCH = 1
    ROUND = 2
    MASKED = 3
    CEILING = 4
    COPIES = 5


class ChunkField(enum.IntEnum):
    """Column of each int64 input of a prefill lane; its tokens follow from TOKENS on."""

    SLOT = 0
    EPOCH = 1
    ROUND = 2
    MASKED = 3
    START = 4
    LENGTH = 5
    FINAL = 6
    PENDING = 7
    NEXT = 8
    TOKENS = 9


class Fence(Protocol):
    """A point in the order of a stream; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Mark what has been enqueued so far."""

    def synchronize(self) -> None:
        """Wait until it has run; at once where nothing was marked."""


class Staging:
    """Host arrays in front of one flat device buffer, used in turn.

    With two of them the plan of a queued round is written while the copy of the running one may
    still be on its way (contract: T6, T7).

    Args:
        sets: flat host tensors, page-locked where the device is not the host.
        fences: one a set, behind its last copy.
    """

    def __init__(self, sets: Sequence[Tensor], fences: Sequence[Fence]) -> None:
        self.sets = tuple(sets)
        self.current = 0
        self._fences = tuple(fences)

    def renew(self) -> None:
        """Go on with the next set; waits until its last copy has left it."""
        self.current = (self.current + 1) % len(self.sets)
        if self._fences:
            self._fences[self.current].synchronize()

    def mark(self) -> None:
        """A copy of the current set has been enqueued."""
        if self._fences:
            self._fences[self.current].record()


class StaticBuffer:
    """A device tensor at a fixed address with host arrays in front of it.

    Attributes:
        tensor: what the program reads.
    """

    def __init__(self, tensor: Tensor, staging: Staging) -> None:
        self.tensor = tensor
        self._staging = staging
        size = tensor.numel()
        self._sets = [flat[:size].view(tensor.shape) for flat in staging.sets]
        self._hosts: list[np.ndarray] = [part.numpy() for part in self._sets]

    @classmethod
    def allocate(cls, size: int, dtype: torch.dtype, device: str) -> StaticBuffer:
        """A zeroed flat buffer; on the CPU its host side is the tensor's own memory."""
        tensor = torch.zeros(size, dtype=dtype, device=device)
        if tensor.device.type == "cpu":
            return cls(tensor, Staging((tensor,), ()))
        if shapes_alone(device):
            return cls(tensor, Staging((torch.zeros(size, dtype=dtype),), ()))
        sets = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(STAGING_SETS)]
        return cls(tensor, Staging(sets, [torch.cuda.Event() for _ in sets]))

    @property
    def host(self) -> np.ndarray:
        """The array to fill before `upload`; `renew` chooses another one."""
        return self._hosts[self._staging.current]

    def view(self, shape: tuple[int, ...]) -> StaticBuffer:
        """The first elements of a flat buffer under another shape, memory and turns shared."""
        size = math.prod(shape)
        return StaticBuffer(self.tensor[:size].view(shape), self._staging)

    def renew(self) -> None:
        """Make a host array current that no copy reads any more; what it holds is undefined."""
        self._staging.renew()

    def upload(self) -> None:
        """One copy from the host's side to the program's, in stream order; none on CPU."""
        source = self._sets[self._staging.current]
        if source.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(source, non_blocking=True)
            self._staging.mark()


@dataclass(frozen=True, slots=True)
class FilterBounds:
    """What the host knows about the sampling parameters of a plan's lanes."""

    max_top_k: int = 0
    every_lane_greedy: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    any_penalty: bool = False
    max_rules: int = 0
    max_bad_words: int = 0
    max_top_logprobs: int = -1
    any_coupled: bool = False
    every_lane_coupled: bool = False
    max_prompt_logprobs: int = -1
    processed_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class LaneBounds:
    """What the host knows about a plan's lanes beyond the plan itself.

    Attributes:
        filters: of the sampling parameters in the lanes' slots.
        context_pages: page-table columns that hold every row the lanes may compute, rejected and
            drafted ones included.
        publishes: some lane may end a row at a page boundary.
    """

    filters: FilterBounds
    context_pages: int
    publishes: bool = True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host-known choices of one execution: fixed per graph when captured, per plan when eager.

    Attributes:
        context_pages: page-table columns in view.
        rows: rows per lane in view (a prefill's longest chunk; W in a round).
        masked: some lane is constrained.
        copies: some lane brings copy tokens.
        drafts: some lane may offer a draft that is not copied; else the drafter proposes nothing.
        sampled: a prefill lane ends its prompt.
        filters: bounds over the lanes' sampling parameters.
        publishes: some lane may end a row at a page boundary.
    """

    context_pages: int
    rows: int
    masked: bool
    copies: bool
    sampled: bool
    filters: FilterBounds
    publishes: bool = True
    drafts: bool = True

    @property
    def may_exhaust(self) -> bool:
        """Whether a row can be left without a token: by bans, by a mask, or by both. A mask alone
        does it where the vocabulary has no token for the only text that may follow."""
        return self.masked or self.filters.max_rules > 0 or self.filters.max_bad_words > 0


class RoundInputs:
    """Inputs of a decode or speculative program of one shape, views of shared arenas.

    Attributes:
        lanes: [B, 5 + D] int64, fields of `LaneField`.
        masks: [B, W, words] int32, read where MASKED is set.
    """

    def __init__(self, lanes: StaticBuffer, masks: StaticBuffer, null_slot: int) -> None:
        self._lanes = lanes
        self._masks = masks
        self._null_slot = null_slot

    @property
    def lanes(self) -> Tensor:
        """Device side of the lane integers."""
        return self._lanes.tensor

    @property
    def masks(self) -> Tensor:
        """Device side of the mask rows."""
        return self._masks.tensor

    def clear(self) -> None:
        """Padded lanes only: null slot, an epoch no slot has. `upload` shows them to a program."""
        self._lanes.renew()
        host = self._lanes.host
        host[:] = ABSENT
        host[:, LaneField.SLOT] = self._null_slot
        host[:, LaneField.MASKED] = 0
        host[:, LaneField.CEILING] = 0

    def upload(self) -> None:
        """Copy the lanes' integers to the program's side."""
        self._lanes.upload()

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in; lanes beyond it stay padded."""
        self.clear()
        if masks is not None:
            self._masks.renew()
        host = self._lanes.host
        for index, lane in enumerate(plan.lanes):
            masked = masks is not None and lane.mask_row >= 0
            row = (lane.slot, lane.epoch, plan.round_id, masked, lane.ceiling, *lane.copy_tokens)
            host[index, : len(row)] = row
            if masks is not None and masked:
                self._copy_masks(index, lane, lane.ceiling, masks)
        self._lanes.upload()
        if masks is not None:
            self._masks.upload()

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """Copy in what the host answered at the barrier: masks, ceilings, replaced drafts.

        The plan's own staging is written again: its copy has arrived, since the drafts have.
        """
        self._masks.renew()
        host = self._lanes.host
        for index, (lane, limit) in enumerate(zip(plan.lanes, answer.limits, strict=True)):
            host[index, LaneField.CEILING] = min(limit, lane.ceiling)
            if lane.mask_row >= 0:
                host[index, LaneField.MASKED] = 1
                self._copy_masks(index, lane, limit, masks)
        if answer.copies:
            host[:, LaneField.COPIES :] = ABSENT
            for index, copies in enumerate(answer.copies):
                host[index, LaneField.COPIES : LaneField.COPIES + len(copies)] = copies
        self._lanes.upload()
        self._masks.upload()

    def _copy_masks(self, index: int, lane: LanePlan, drafts: int, masks: np.ndarray) -> None:
        rows = drafts + 1
        self._masks.host[index, :rows] = masks[lane.mask_row : lane.mask_row + rows]


class PrefillInputs:
    """Inputs of a prefill program of one shape, views of shared arenas.

    Attributes:
        lanes: [B, 9 + T] int64, fields of `ChunkField`, then the chunk's tokens.
        masks: [B, 1, words] int32.
    """

    def __init__(self, lanes: StaticBuffer, masks: StaticBuffer, null_slot: int) -> None:
        self._lanes = lanes
        self._masks = masks
        self._null_slot = null_slot

    @property
    def lanes(self) -> Tensor:
        """Device side of the lane integers and tokens."""
        return self._lanes.tensor

    @property
    def masks(self) -> Tensor:
        """Device side of the mask rows."""
        return self._masks.tensor

    def clear(self) -> None:
        """Padded lanes only: null slot, an epoch no slot has, no tokens; then `upload`."""
        self._lanes.renew()
        host = self._lanes.host
        host[:] = 0
        host[:, ChunkField.SLOT] = self._null_slot
        host[:, ChunkField.EPOCH] = ABSENT

    def upload(self) -> None:
        """Copy the lanes' integers to the program's side."""
        self._lanes.upload()

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in; lanes beyond it stay padded."""
        self.clear()
        if masks is not None:
            self._masks.renew()
        host = self._lanes.host
        for index, lane in enumerate(plan.prefill):
            masked = masks is not None and lane.mask_row >= 0
            host[index, : ChunkField.TOKENS] = (
                lane.slot,
                lane.epoch,
                plan.round_id,
                masked,
                lane.start,
                len(lane.tokens),
                lane.final,
                lane.pending,
                lane.next_token,
            )
            host[index, ChunkField.TOKENS : ChunkField.TOKENS + len(lane.tokens)] = lane.tokens
            if masks is not None and masked:
                self._masks.host[index, 0] = masks[lane.mask_row]
        self._lanes.upload()
        if masks is not None:
            self._masks.upload()

"""Static inputs of a program and the facts the host fixes about one execution.

A plan becomes two or three copies: the lanes' integers, the mask rows if any lane is constrained,
and the prompt chunk of a prefill. On CPU the host array and the tensor share memory.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.plan import LanePlan, MaskAnswer, RoundPlan

ABSENT = -1


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


class StaticBuffer:
    """A device tensor at a fixed address with a host array in front of it.

    Attributes:
        host: numpy array to fill; on CPU the tensor's own memory.
        tensor: what the program reads.
    """

    def __init__(self, tensor: Tensor, staging: Tensor) -> None:
        self.tensor = tensor
        self._staging = staging
        self.host: np.ndarray = staging.numpy()

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> StaticBuffer:
        """A zeroed buffer; its host side is pinned where the device cannot read host memory."""
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        if tensor.device.type == "cpu":
            return cls(tensor, tensor)
        return cls(tensor, torch.zeros(shape, dtype=dtype, pin_memory=True))

    def view(self, shape: tuple[int, ...]) -> StaticBuffer:
        """The first elements of a flat buffer under another shape, memory shared."""
        size = math.prod(shape)
        tensor = self.tensor[:size].view(shape)
        shared = self._staging is self.tensor
        return StaticBuffer(tensor, tensor if shared else self._staging[:size].view(shape))

    def upload(self) -> None:
        """One copy from the host's side to the program's; none on CPU."""
        if self._staging is not self.tensor:
            self.tensor.copy_(self._staging, non_blocking=True)


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
        """Padded lanes only: null slot, an epoch no slot has."""
        host = self._lanes.host
        host[:] = ABSENT
        host[:, LaneField.SLOT] = self._null_slot
        host[:, LaneField.MASKED] = 0
        host[:, LaneField.CEILING] = 0

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in; lanes beyond it stay padded."""
        self.clear()
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
        """Copy in what the host answered at the barrier: masks, ceilings, replaced drafts."""
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
        """Padded lanes only: null slot, an epoch no slot has, no tokens."""
        host = self._lanes.host
        host[:] = 0
        host[:, ChunkField.SLOT] = self._null_slot
        host[:, ChunkField.EPOCH] = ABSENT

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in; lanes beyond it stay padded."""
        self.clear()
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

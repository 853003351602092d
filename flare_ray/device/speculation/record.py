"""The completion record: rows the program writes, frames the host reads (contract: T5, S6).

The program writes one static device buffer, a lane a row. The host copies it into one of two
frames, takes the lane checksums there (on every rank, over the whole row: identity, counters and
tokens, hence also the random offset 12 N) and hands the rows on.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.record import METADATA_FIELDS, RECORD_FIELDS, Field
from flare_ray.device.speculation.commit import Outcome
from flare_ray.device.speculation.inputs import LaneField
from flare_ray.device.speculation.lanes import Lanes
from flare_ray.device.state.layout import Core
from flare_ray.errors import ContractViolation

NUM_FRAMES = 2


@dataclass(slots=True)
class Emission:
    """What a record says beside the slot's counters.

    round_id, drafted, offered, accepted, emitted, copy_bits, width, flags: [B] int64; tokens: [B,
    W] int64, the first `emitted` of each row count.
    """

    round_id: Tensor
    drafted: Tensor
    offered: Tensor
    accepted: Tensor
    emitted: Tensor
    copy_bits: Tensor
    width: Tensor
    flags: Tensor
    tokens: Tensor


def write_record(record: Tensor, lanes: Lanes, outcome: Outcome, emission: Emission) -> None:
    """Write rows [B, RECORD_FIELDS] of the static record buffer in place.

    An inactive lane's row is zero but for the planned epoch and round.
    """
    columns = {
        Field.UID: lanes.field(Core.UID),
        Field.EPOCH: lanes.epoch,
        Field.ROUND: emission.round_id,
        Field.STATUS: outcome.status,
        Field.CONSUMED: outcome.consumed,
        Field.GENERATED: outcome.generated,
        Field.BUDGET_LEFT: outcome.budget,
        Field.DRAFTED: emission.drafted,
        Field.OFFERED: emission.offered,
        Field.ACCEPTED: emission.accepted,
        Field.EMITTED: emission.emitted,
        Field.COPY_BITS: emission.copy_bits,
        Field.DRAFT_POSITION: outcome.draft_position,
        Field.WIDTH: emission.width,
        Field.FLAGS: emission.flags,
        Field.CHECKSUM: torch.zeros_like(lanes.epoch),
    }
    width = emission.tokens.shape[1]
    rows = torch.arange(width, device=record.device)
    shown = torch.where(rows < emission.emitted.unsqueeze(1), emission.tokens, 0)
    record[:, METADATA_FIELDS + width :].zero_()
    record[:, METADATA_FIELDS : METADATA_FIELDS + width] = shown
    torch.stack([columns[field] for field in Field], dim=1, out=record[:, :METADATA_FIELDS])


def write_idle_record(record: Tensor, planned: Tensor) -> None:
    """What `write_record` writes when no lane is active.

    Args:
        record: [B, RECORD_FIELDS] int64, overwritten.
        planned: [B, lane fields] int64, a round's lane inputs.
    """
    record.zero_()
    record[:, Field.EPOCH] = planned[:, LaneField.EPOCH]
    record[:, Field.ROUND] = planned[:, LaneField.ROUND]


def stamp_checksums(rows: np.ndarray) -> int:
    """Fill the CHECKSUM column of rows [n, RECORD_FIELDS] int64 in place with each row's CRC-32.

    Returns:
        CRC-32 of the whole frame, lane order included.
    """
    rows[:, Field.CHECKSUM] = 0
    for row in rows:
        row[Field.CHECKSUM] = zlib.crc32(row.data)
    return zlib.crc32(rows.data)


class Frames:
    """Two sets of host frames used alternately; one is owned until its consumer releases it.

    A frame is filled by copies in stream order; `receive` waits for them alone, not for what was
    enqueued behind them. On the CPU a copy is done when it returns.

    Args:
        capacity: largest number of record rows.
        score_words / prompt_words: int32 words of the largest log-probability outputs.
    """

    def __init__(
        self, capacity: int, device: str, *, score_words: int = 0, prompt_words: int = 0
    ) -> None:
        pinned = device != "cpu"

        def frame(size: int, dtype: torch.dtype) -> list[Tensor]:
            return [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(NUM_FRAMES)]

        self._records = frame(capacity * RECORD_FIELDS, torch.int64)
        self._scores = frame(score_words, torch.int32)
        self._prompt_scores = frame(prompt_words, torch.int32)
        self._arrived = [torch.cuda.Event() for _ in range(NUM_FRAMES)] if pinned else []
        self._owned = [False] * NUM_FRAMES
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Exact size of all frames."""
        frames = (*self._records, *self._scores, *self._prompt_scores)
        return sum(frame.nbytes for frame in frames)

    def send(
        self, record: Tensor, scores: Tensor | None = None, prompt_scores: Tensor | None = None
    ) -> Frame:
        """Enqueue copies of a program's outputs into the next frame.

        Args:
            record: [n, RECORD_FIELDS] int64.
            scores / prompt_scores: int32, None where nobody asked.
        Raises:
            ContractViolation: the frame is still owned.
        """
        index = self._next
        if self._owned[index]:
            raise ContractViolation(
                f"completion frame {index} is still being read; release it before a third round"
            )
        self._owned[index] = True
        self._next = (index + 1) % NUM_FRAMES
        frame = Frame(
            index,
            _copy(record, self._records[index]),
            None if scores is None else _copy(scores, self._scores[index]),
            None if prompt_scores is None else _copy(prompt_scores, self._prompt_scores[index]),
        )
        if self._arrived:
            self._arrived[index].record()
        return frame

    def receive(self, frame: Frame) -> np.ndarray:
        """Wait for a frame's copies; its record rows [n, RECORD_FIELDS] int64."""
        if self._arrived:
            self._arrived[frame.index].synchronize()
        return frame.record

    def release(self, frame: Frame) -> None:
        """The consumer is done with a frame."""
        self._owned[frame.index] = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One round's outputs on the host; arrays hold it once it was received.

    record: [n, RECORD_FIELDS] int64; scores, prompt_scores: int32 as sent, or None.
    """

    index: int
    record: np.ndarray
    scores: np.ndarray | None
    prompt_scores: np.ndarray | None


def _copy(source: Tensor, host: Tensor) -> np.ndarray:
    """Copy into the first elements of a flat host tensor; a view of them."""
    target = host[: source.numel()].view(source.shape)
    target.copy_(source, non_blocking=True)
    return target.numpy()

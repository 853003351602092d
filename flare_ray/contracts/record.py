"""The completion record: one int64 row per prepared slot (contract: T5).

16 metadata fields then 8 token fields. Two transfer frames exist; a frame is owned until its
transfer and its host consumption have finished. Only rank 0 returns rows; the other ranks return
the checksum over the whole frame.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable

import msgspec

METADATA_FIELDS = 16
TOKEN_FIELDS = 8
RECORD_FIELDS = METADATA_FIELDS + TOKEN_FIELDS


class Field(enum.IntEnum):
    """Column of each metadata field; tokens follow from METADATA_FIELDS on."""

    UID = 0
    EPOCH = 1
    ROUND = 2
    STATUS = 3
    CONSUMED = 4
    GENERATED = 5
    BUDGET_LEFT = 6
    DRAFTED = 7
    OFFERED = 8
    ACCEPTED = 9
    EMITTED = 10
    COPY_BITS = 11
    DRAFT_POSITION = 12
    WIDTH = 13
    FLAGS = 14
    CHECKSUM = 15


_EMITTED = int(Field.EMITTED)
"""A plain number: it is read for every lane of every round."""


class Status(enum.IntFlag):
    """Lane status after the round."""

    IDLE = 0
    ACTIVE = 1
    """The lane executed a state transition (a stale epoch or a finished request did not)."""
    EOS = 2
    """The last emitted token is in the slot's EOS set; it stays pending (contract: T3)."""
    LENGTH = 4
    """The output budget is spent."""
    NONFINITE = 8
    """A verified row's logits held no finite maximum; nothing was emitted and the request must end
    with an error."""
    NO_TOKEN = 16
    """Masks, bans and bias leave no token at the lane's first row; nothing was emitted."""


FAULTS = Status.NONFINITE | Status.NO_TOKEN
"""A lane with one of them emitted nothing and has ended."""


class Flag(enum.IntFlag):
    """What kind of transition the row reports."""

    NONE = 0
    PREFILL = 1
    FIRST_TOKEN = 2
    MASKED = 4


class LaneRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One lane's completion, unpacked. `tokens` holds exactly `emitted` ids.

    consumed, generated and budget_left are values *after* the round; drafted, offered, accepted,
    emitted belong to it. `scores` holds their log-probabilities where the request asked for them
    (`unpack_scores`), `prompt_scores` those of the prompt tokens behind a scored prefill's rows.
    `copy_bits` bit k = draft k was a copy; `draft_position` = pairs in the
    drafter's cache.
    """

    uid: int
    epoch: int
    round_id: int
    status: int
    consumed: int
    generated: int
    budget_left: int
    drafted: int
    offered: int
    accepted: int
    emitted: int
    copy_bits: int
    draft_position: int
    width: int
    flags: int
    checksum: int
    tokens: tuple[int, ...]
    scores: bytes = b""
    prompt_scores: bytes = b""


_lane_record: Callable[..., LaneRecord] = LaneRecord
"""Its fields by position: a type checker cannot count those of a slice."""


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token (contract: K4): under the model's own distribution, before
    penalties, rules, masks, temperature and filters; under the one drawn from where the deployment
    says `logprobs: processed`.

    Attributes:
        top_ids / top_logprobs: the most probable tokens, best first, ties to the lowest id.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RoundReply(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What one rank sends back for one plan.

    Attributes:
        rows: rank 0: flat int64 values, RECORD_FIELDS per lane in plan order; empty on other ranks.
        checksum: over every lane's accepted counts, tokens and offsets; equal on all ranks or the
            engine stops (S6).
        elapsed_ns: device program time of this round (host clock around the program on CPU).
        scores: rank 0: packed `TokenScore`s per lane in plan order, b"" where none were asked for;
            empty where no lane asked.
        prompt_scores: likewise of prompt tokens.
        error: "" or the rank's own failure text; a reply with an error is its last.
        is_usual: the program took the time that it usually takes; False while a CPU rank has yet to
            record it.
    """

    rank: int
    round_id: int
    checksum: int
    elapsed_ns: int
    rows: tuple[int, ...] = ()
    error: str = ""
    scores: tuple[bytes, ...] = ()
    prompt_scores: tuple[bytes, ...] = ()
    is_usual: bool = True


class Proposals(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What rank 0 sends at a barrier: the drafts of each lane, in plan order (contract: G5).

    A plan without drafts to check has no barrier. The round's reply follows once it is answered.
    """

    rank: int
    round_id: int
    drafts: tuple[tuple[int, ...], ...]


def unpack_rows(
    rows: tuple[int, ...], scores: tuple[bytes, ...] = (), prompt_scores: tuple[bytes, ...] = ()
) -> tuple[LaneRecord, ...]:
    """Split the flat rows of a reply into lane records; whole rows of integers, as decoded."""
    records = []
    for lane, start in enumerate(range(0, len(rows), RECORD_FIELDS)):
        first = start + METADATA_FIELDS
        tokens = rows[first : first + rows[start + _EMITTED]]
        own = scores[lane] if scores else b""
        prompt = prompt_scores[lane] if prompt_scores else b""
        records.append(_lane_record(*rows[start:first], tokens, own, prompt))
    return tuple(records)


def unpack_scores(scores: bytes, tokens: int) -> tuple[TokenScore, ...]:
    """Scores of `tokens` >= 1 tokens: per token 4-byte words, little-endian: its log-probability,
    n ids, n log-probabilities."""
    words = len(scores) // 4 // tokens
    top = (words - 1) // 2
    layout = struct.Struct(f"<f{top}i{top}f")
    return tuple(
        TokenScore(row[0], row[1 : 1 + top], row[1 + top :]) for row in layout.iter_unpack(scores)
    )

"""Encoding of channel (c): one msgpack message per plan and per reply, bounded in size.

Owns the size law and the greeting of a rank; knows nothing of sockets' lifetimes (`channel.py`) or
of what a plan means. Never pickle: a message is data, not code (design/ray-serve.md section 7).
"""

from __future__ import annotations

import msgspec

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_RULES,
    MAX_SHARED_PAGES,
    LogitRule,
    MaskAnswer,
    PageGrant,
    PrefillLane,
    RoundPlan,
    SlotInit,
    SlotRestore,
    SnapshotSave,
)
from flare_ray.contracts.record import Proposals, RoundReply
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.contracts.tiers import TierOrder, TierReport
from flare_ray.errors import ConfigError, ContractViolation

MAX_MESSAGE_BYTES = 64 * 1024
"""Largest plan (design/architecture.md section 1). Larger data, such as grammar masks, travels in a
shared-memory block that the plan names."""

REPLY_MESSAGES = 2
"""A reply may be this many times as large: 256 tokens with 20 log-probabilities each are 42 KiB
beside the record."""

SEND_BUFFER_BYTES = 8 * MAX_MESSAGE_BYTES
"""Kernel buffer asked for at each end. Two queued plans of the largest size must fit beside the
kernel's bookkeeping, so that `submit` never waits; eight were measured to fit."""

MAX_QUEUED_ROUNDS = 2
"""Rounds that may be unanswered at once (contract: T6)."""

ERROR_TEXT_BYTES = 8 * 1024
"""Longest failure text of a rank; the end is kept, where a traceback names the cause."""


class RankHello(msgspec.Struct, frozen=True, array_like=True):
    """First message of a rank on its socket; a descriptor for its last words travels with it.

    Attributes:
        world_size: ranks the sender believes in; must equal the channel's.
    """

    rank: int
    world_size: int
    pid: int


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(RoundPlan | MaskAnswer | TierOrder).decode
_decode_reply = msgspec.msgpack.Decoder(RoundReply | Proposals | TierReport).decode
_decode_hello = msgspec.msgpack.Decoder(RankHello).decode


def encode_plan(plan: RoundPlan) -> bytes:
    """Bytes of one plan.

    Raises:
        ContractViolation: the plan is larger than MAX_MESSAGE_BYTES.
    """
    message = _encode(plan)
    if len(message) > MAX_MESSAGE_BYTES:
        raise ContractViolation(
            f"the plan of round {plan.round_id} is {len(message)} bytes, at most "
            f"{MAX_MESSAGE_BYTES}: {len(plan.prefill)} prefill lanes, {len(plan.grants)} page "
            "grants; lower prefill_tokens or grant pages in smaller steps"
        )
    return message


def encode_order(order: TierOrder) -> bytes:
    """Bytes of one move of a snapshot.

    Raises:
        ContractViolation: the order is larger than MAX_MESSAGE_BYTES.
    """
    message = _encode(order)
    if len(message) > MAX_MESSAGE_BYTES:
        raise ContractViolation(
            f"tier order {order.ticket} is {len(message)} bytes, at most {MAX_MESSAGE_BYTES}: "
            f"{len(order.pages)} pages"
        )
    return message


def encode_report(report: TierReport) -> bytes:
    """Bytes of one report of a move; its text is short."""
    return _encode(report)


def encode_reply(reply: RoundReply) -> bytes:
    """Bytes of one reply; an oversized one becomes an error reply, since the rank cannot raise."""
    message = _encode(reply)
    limit = max_reply_bytes()
    if len(message) <= limit:
        return message
    return _encode(
        error_reply(
            reply.rank,
            reply.round_id,
            f"the reply is {len(message)} bytes, at most {limit}: lower concurrency",
        )
    )


def max_reply_bytes() -> int:
    """Largest reply."""
    return REPLY_MESSAGES * MAX_MESSAGE_BYTES


def encode_hello(hello: RankHello) -> bytes:
    """Bytes of a rank's greeting."""
    return _encode(hello)


def encode_answer(answer: MaskAnswer) -> bytes:
    """Bytes of the host's answer at a barrier; a few per lane."""
    return _encode(answer)


def encode_proposals(proposals: Proposals) -> bytes:
    """Bytes of a round's drafts; a few per lane."""
    return _encode(proposals)


def decode_order(message: bytes | memoryview) -> RoundPlan | MaskAnswer | TierOrder:
    """What the controller sent.

    Raises:
        msgspec.MsgspecError: the bytes are none of them.
    """
    return _decode_order(message)


def decode_reply(message: bytes | memoryview) -> RoundReply | Proposals | TierReport:
    """What a rank sent.

    Raises:
        msgspec.MsgspecError: the bytes are none of them.
    """
    return _decode_reply(message)


def decode_hello(message: bytes) -> RankHello:
    """The greeting in `message`.

    Raises:
        msgspec.MsgspecError: the bytes are no greeting.
    """
    return _decode_hello(message)


def error_reply(rank: int, round_id: int, text: str) -> RoundReply:
    """A rank's last reply: `text`, shortened from the front to ERROR_TEXT_BYTES."""
    raw = text.encode("utf-8", errors="replace")
    if len(raw) > ERROR_TEXT_BYTES:
        text = "... " + raw[-ERROR_TEXT_BYTES:].decode("utf-8", errors="replace")
    return RoundReply(
        rank=rank, round_id=round_id, checksum=0, elapsed_ns=0, error=text or "unknown error"
    )


def check_message_bounds(manifest: PreparedManifest) -> None:
    """Refuse at start-up a preparation whose largest prefill plan would not fit one message.

    Raises:
        ConfigError: naming the shape and its plan's size.
    """
    for shape in manifest.shapes:
        if shape.kind not in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL):
            continue
        size = len(_encode(_largest_prefill(manifest, shape)))
        if size > MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"a prefill of {shape.batch_capacity} lanes x {shape.token_capacity} tokens may "
                f"need a plan of {size} bytes, at most {MAX_MESSAGE_BYTES}; lower prefill_tokens "
                f"({manifest.prefill_tokens}) or concurrency ({manifest.slots})"
            )


def _largest_prefill(manifest: PreparedManifest, shape: GraphShape) -> RoundPlan:
    """Every lane starts a request, fills its chunk and is granted the chunk's pages; one of them
    brings as many rules and shared pages as a plan may hold."""
    token, page, large = manifest.vocab_size - 1, manifest.num_pages - 1, 2**62
    lanes = range(shape.batch_capacity)
    pages = shape.token_capacity // manifest.page_tokens + 2
    shared = min(MAX_SHARED_PAGES, manifest.num_pages) if manifest.snapshot_rows else 0
    return RoundPlan(
        round_id=large,
        shape=shape,
        inits=tuple(
            SlotInit(
                slot=lane,
                epoch=large,
                uid=large,
                seed=large,
                budget=manifest.context_tokens,
                temperature=1.5,
                top_k=token,
                top_p=0.5,
                min_p=0.5,
                eos_ids=(token,) * len(manifest.eos_ids),
                repetition=1.5,
                presence=0.5,
                frequency=0.5,
                rules=(LogitRule(token, 0.5),) * (0 if lane else MAX_LOGIT_RULES),
                seen=b"" if lane else bytes(manifest.vocab_size // 8 + 1),
                bad_words=((token,) * MAX_BAD_WORD_TOKENS,) * (0 if lane else MAX_BAD_WORDS),
            )
            for lane in lanes
        ),
        grants=tuple(
            PageGrant(lane, page, (page,) * (pages if lane else pages + shared)) for lane in lanes
        ),
        restores=tuple(SlotRestore(lane, large, large, large, page, page) for lane in lanes),
        captures=tuple(SnapshotSave(lane, large, large, large, True) for lane in lanes),
        saves=tuple(SnapshotSave(lane, large, large, large, True) for lane in lanes),
        prefill=tuple(
            PrefillLane(
                slot=lane,
                epoch=large,
                start=manifest.context_tokens,
                tokens=(token,) * shape.token_capacity,
                final=True,
            )
            for lane in lanes
        ),
    )

"""The multiplexed output stream from an engine to each ingress replica (channel (b)) and the unary
call's answer (a).

One `StreamBatch` per ingress replica per round carries the deltas of all its requests,
msgpack-encoded, pushed to the ZeroMQ PULL socket that the ingress owns. The first item of a
request is `Admitted` or `Failed`.
"""

from __future__ import annotations

import enum

import msgspec

from flare_ray.contracts.record import TokenScore


class TokenSource(enum.IntEnum):
    """Where a generated token came from: the target's own draw, or an accepted draft."""

    TARGET = 0
    """Drawn where no draft was offered or accepted: corrections, bonus tokens, a prompt's first."""
    DRAFTER = 1
    OWN_TEXT = 2
    """Copied from the request's prompt or output."""
    HISTORY = 3
    """Copied from what other requests were answered."""
    PREDICTION = 4
    """Copied from the request's `prediction`."""
    GRAMMAR = 5
    """The only text that the request's grammar allowed there."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The request holds a slot or a place in the queue that it will not lose: the response may
    open."""

    request_id: str


class Delta(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Newly visible output of one request.

    Attributes:
        tokens: visible token ids, in order; tokens that might still begin a stop string are held
            back.
        scores: one per token where the request asked for log-probabilities, else empty.
        prompt_scores: of the next prompt tokens, in order, where the request asked for them; the
            prompt's first token has none.
        trim_bytes: bytes to drop from the end of the *last* token's text (a stop ended inside it).
        sources: one `TokenSource` per token where the request asked for them, else empty.
    """

    request_id: str
    tokens: tuple[int, ...]
    trim_bytes: int = 0
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    sources: bytes = b""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The request has ended well; nothing follows.

    Attributes:
        reason: "stop" (EOS, stop string or stop token) or "length".
        completion_tokens: generated tokens through the one that ended the request, EOS included.
        stop_reason: the stop string, token id or token sequence that matched, or None.
        drafts_offered / drafts_accepted / rounds: speculation totals of this request.
        cached_tokens: prompt tokens that were restored from a prefix snapshot.
        copies_offered / copies_accepted: those of the drafts that were copied from text.
        predicted_offered / predicted_accepted: those of the copies that the request's `prediction`
            foretold.
        ender: the EOS or stop token that ended it, which no delta shows; -1 = something else did.
        ender_score: its score, where the request asked for log-probabilities; else None.
    """

    request_id: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str | int | tuple[int, ...] | None = None
    drafts_offered: int = 0
    drafts_accepted: int = 0
    rounds: int = 0
    cached_tokens: int = 0
    copies_offered: int = 0
    copies_accepted: int = 0
    predicted_offered: int = 0
    predicted_accepted: int = 0
    ender: int = -1
    ender_score: TokenScore | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The request has ended with an error; nothing follows.

    Attributes:
        code: "invalid_request_error", "overloaded", "rank_failure", "cancelled", "deadline",
            "nonfinite_logits", "context_length_exceeded", "internal_error" (our own bug; the engine
            has stopped).
        status: HTTP status if no response has been opened.
        retry_after_s: > 0 only for overload.
        emitted: whether any output had been made visible (a request without output may be retried
            once).
    """

    request_id: str
    code: str
    message: str
    status: int = 500
    param: str | None = None
    retry_after_s: float = 0.0
    emitted: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Sent every 2 s to each ingress with open requests; an ingress ends its requests after 10 s
    without one."""

    rounds: int


StreamItem = Admitted | Delta | Finished | Failed | Heartbeat


class StreamBatch(msgspec.Struct, frozen=True, array_like=True):
    """All items of one round for one ingress replica.

    Attributes:
        secret: the engine's start-up secret, compared in constant time by the ingress.
        engine_id: identity of the engine replica; a new one after each restart.
        sequence: rises by one per batch to this ingress, so that a lost batch is noticed.
    """

    secret: bytes
    engine_id: str
    sequence: int
    items: tuple[StreamItem, ...]

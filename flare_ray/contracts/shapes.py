"""Graph shapes: what one prepared program was built for, and which shapes a deployment prepares
(contract: G1, G2, G5).

Letters: B batch capacity, D draft depth, W verification width (pending token included), P packed
    row capacity.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

PAGE_TOKENS = 64
"""Token positions in one page (contract: M1)."""
MAX_WIDTH = 8
"""Seven drafts and the pending token: the history horizon that every width shares (contract:
M3)."""

SCORED_PREFILL_TOKENS = 128
"""Rows of a prefill that scores its prompt: their scores fit one reply."""


class GraphKind(enum.StrEnum):
    """Closed set of prepared programs; the operation ids 10, 11 and 13 stay reserved (contract:
    G5)."""

    PREFILL = "prefill"
    SCORED_PREFILL = "scored_prefill"
    DECODE = "decode"
    RESUME = "resume"
    SPECULATIVE = "speculative"
    MIXED = "mixed"
    INIT = "init"
    RESTORE = "restore"
    SNAPSHOT = "snapshot"
    VISION = "vision"


class GraphShape(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one catalog entry; compared by fields.

    Attributes:
        batch_capacity: B, lanes the program was built for; missing lanes are padded onto the null
            slot.
        token_capacity: rows per lane of a prefill program; equals `verify_width` for rounds.
        draft_tokens: D, drafts the drafter produces; 0 for decode and prefill.
        verify_width: W, target rows per lane.
        packed_capacity: P, physical target rows; 0 = rectangular B x W.
        speculation: True = absorbs and keeps drafter state; False = ordinary family (contract: R6).
        masked: a round that applies grammar masks (contract: K1).
    """

    kind: GraphKind
    batch_capacity: int
    token_capacity: int
    draft_tokens: int = 0
    verify_width: int = 1
    packed_capacity: int = 0
    speculation: bool = True
    masked: bool = False

    @property
    def rows(self) -> int:
        """Target rows of a round's program, all lanes together."""
        return self.packed_capacity or self.batch_capacity * self.verify_width

    @property
    def has_barrier(self) -> bool:
        """Whether the program stops between drafts and verification until the host has written the
        masks behind each draft (contract: G5); without drafts the masks come with the plan."""
        return self.masked and self.verify_width > 1


PROMPT_KINDS = frozenset({GraphKind.PREFILL, GraphKind.SCORED_PREFILL, GraphKind.RESUME})
"""Programs whose lanes are `PrefillLane`s; those of a resume consume no token."""


def batch_capacities(concurrency: int) -> tuple[int, ...]:
    """Powers of two through the padded concurrency limit: 3 gives (1, 2, 4)."""
    capacities = [1]
    while capacities[-1] < concurrency:
        capacities.append(capacities[-1] * 2)
    return tuple(capacities)


def speculative_shapes(
    concurrency: int, widths: Sequence[int], token_capacity: int, *, block: bool = False
) -> tuple[GraphShape, ...]:
    """Rounds to prepare: width one at every batch capacity, wider ones where B * W fits (contract:
    G1).

    Args:
        concurrency: largest number of lanes in a round.
        widths: increasing widths that include one.
        token_capacity: largest B * W of a wide round.
        block: wide rounds all draft what the widest verifies (contract: G3).
    """
    most = widths[-1] - 1
    return tuple(
        GraphShape(
            kind=GraphKind.SPECULATIVE,
            batch_capacity=batch,
            token_capacity=width,
            draft_tokens=most if block and width > 1 else width - 1,
            verify_width=width,
        )
        for batch in batch_capacities(concurrency)
        for width in widths
        if width == 1 or batch * width <= token_capacity
    )


def packed_shapes(
    concurrency: int, width: int, token_capacity: int, rows: Sequence[int]
) -> tuple[GraphShape, ...]:
    """Rounds whose lanes share rows (contract: G3): P = so many rows a lane on average.

    Args:
        width: W, the widest of the rectangular rounds; drafts are W - 1.
        token_capacity: largest P.
        rows: rows a lane, each below `width`.
    """
    return tuple(
        GraphShape(
            kind=GraphKind.SPECULATIVE,
            batch_capacity=batch,
            token_capacity=width,
            draft_tokens=width - 1,
            verify_width=width,
            packed_capacity=batch * share,
        )
        for batch in batch_capacities(concurrency)
        for share in rows
        if batch * share <= token_capacity
    )


def masked_shapes(rounds: Sequence[GraphShape]) -> tuple[GraphShape, ...]:
    """The masked entry beside each of `rounds` (contract: G2)."""
    return tuple(msgspec.structs.replace(shape, masked=True) for shape in rounds)


def decode_shapes(concurrency: int) -> tuple[GraphShape, ...]:
    """Ordinary width-one rounds that keep no drafter state (contract: R6)."""
    return tuple(
        GraphShape(kind=GraphKind.DECODE, batch_capacity=batch, token_capacity=1, speculation=False)
        for batch in batch_capacities(concurrency)
    )


def prefill_shapes(
    concurrency: int, prefill_tokens: int, *, speculation: bool
) -> tuple[GraphShape, ...]:
    """Prefill programs of one family: B lanes share a chunk of `prefill_tokens` rows, so every one
    of them stalls the decoding lanes about as long as the others.

    Args:
        concurrency: largest number of lanes.
        prefill_tokens: rows of one program, B * token_capacity at most.
        speculation: True = absorbs drafter history (contract: R6).
    """
    return tuple(
        GraphShape(
            kind=GraphKind.PREFILL,
            batch_capacity=batch,
            token_capacity=prefill_tokens // batch,
            speculation=speculation,
        )
        for batch in batch_capacities(concurrency)
        if batch <= prefill_tokens
    )


def scored_shape(prefill_tokens: int, *, speculation: bool) -> GraphShape:
    """The program of prompts whose tokens are scored, one lane at a time: every row passes through
    the vocabulary's head, so it is kept short."""
    return GraphShape(
        kind=GraphKind.SCORED_PREFILL,
        batch_capacity=1,
        token_capacity=min(prefill_tokens, SCORED_PREFILL_TOKENS),
        speculation=speculation,
    )


def resume_shapes(concurrency: int, *, speculation: bool) -> tuple[GraphShape, ...]:
    """Programs that go on where a snapshot ends, without consuming a token (contract: M5)."""
    return tuple(
        GraphShape(
            kind=GraphKind.RESUME, batch_capacity=batch, token_capacity=1, speculation=speculation
        )
        for batch in batch_capacities(concurrency)
    )

"""The round plan: everything the host decides about one program execution (contract: T6, C1;
channel (c)).

A plan is encoded with msgpack and stays <= 64 KiB. Kernels read pending tokens and consumed
positions from request state on the device, so a plan never carries them: round n + 1 can be queued
before round n has answered.
"""

from __future__ import annotations

import msgspec

from flare_ray.contracts.shapes import GraphShape

MAX_EOS_IDS = 16
"""Terminal token ids one slot may hold on the device."""
MAX_LOGIT_RULES = 512
"""Logit rules one slot may hold: OpenAI documents 300 biased tokens; the rest is for min_tokens."""
MAX_BAD_WORDS = 128
"""Banned token sequences one slot may hold."""
MAX_BAD_WORD_TOKENS = 8
"""Longest banned sequence."""
MAX_SHARED_PAGES = 3072
"""Pages that one restored slot may share: their ids fit a plan beside the largest chunk."""
MAX_TOP_LOGPROBS = 20
"""Most probable tokens reported beside each generated one; OpenAI's own bound."""
ALWAYS = 1 << 62
"""A position no row has: a rule that never lapses."""


class LogitRule(msgspec.Struct, frozen=True, array_like=True):
    """Adds `addend` to one token's logit in every row whose position lies below `before`.

    Attributes:
        addend: finite, or -inf for a ban.
        before: row position, that is consumed tokens in front of the row's input; ALWAYS = every
            row.
    """

    token: int
    addend: float
    before: int = ALWAYS


class SlotInit(msgspec.Struct, frozen=True, array_like=True):
    """Hands a slot to a request: zeroes its state rows and writes its request state before the
    program runs.

    Attributes:
        epoch: slot generation, raised at each reuse; work that carries another epoch changes
            nothing (contract: T6).
        uid: engine-unique integer of the request, echoed in its records.
        seed: unsigned 64-bit request seed; keys per domain follow from rng.stream_key.
        budget: output tokens the device may emit.
        eos_ids: device-visible terminal tokens, at most MAX_EOS_IDS; empty under ignore_eos.
        repetition: divides positive and multiplies negative logits of tokens in prompt or output;
            1 = off.
        presence / frequency: subtracted once / per occurrence of generated tokens; 0 = off.
        rules: logit bias and bans, at most MAX_LOGIT_RULES.
        bad_words: sequences whose last token is banned where the generated tokens end in the
            others; at most MAX_BAD_WORDS of 1 .. MAX_BAD_WORD_TOKENS tokens.
        top_logprobs: alternatives whose log-probabilities are reported with every generated token,
            at most MAX_TOP_LOGPROBS; -1 = none are reported (contract: K4).
        prompt_logprobs: likewise of prompt tokens, in a scored prefill.
        seen: bit t % 8 of byte t // 8 set = token t occurs in the part of the prompt that a restore
            brings; needed under repetition != 1, since no program consumes that part.
        coupled: every token is the target's own draw with noise keyed by seed, position and token
            id: the text does not depend on drafts, widths or neighbours (contract: S8).
        generated_from: position from which prefilled tokens count as generated (resume after
            preemption); ALWAYS = all of them are prompt.
        output: tokens generated before a preemption that a restore brings, from `generated_from` on
            in order, four bytes each, little-endian; needed where penalties or bad words read them,
            since no program consumes them again. Counts with the shared pages' ids against
            MAX_SHARED_PAGES.
    """

    slot: int
    epoch: int
    uid: int
    seed: int
    budget: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eos_ids: tuple[int, ...]
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    rules: tuple[LogitRule, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int = -1
    seen: bytes = b""
    coupled: bool = False
    generated_from: int = ALWAYS
    output: bytes = b""
    prompt_logprobs: int = -1

    @property
    def penalised(self) -> bool:
        """Whether the slot's token counts are read (contract: K3)."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


class PageGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Writes `page_ids` into a slot's page table from entry `first_index` on. Page 0 is the null
    page, never granted."""

    slot: int
    first_index: int
    page_ids: tuple[int, ...]


class SnapshotSave(msgspec.Struct, frozen=True, array_like=True):
    """Copies a slot's state after exactly `consumed` tokens into a snapshot row (contract: M4).

    Attributes:
        epoch: owner of the slot whose state is meant; it may have ended.
        row: snapshot row that is overwritten.
        live: True = the slot's present state, False = its publication row, which must hold
            `consumed` tokens.
    """

    slot: int
    epoch: int
    consumed: int
    row: int
    live: bool = False


class SlotRestore(msgspec.Struct, frozen=True, array_like=True):
    """Puts a snapshot row's state into a slot that the same plan hands over (contract: M4).

    Pages below number (consumed - 1) // 64 are granted as they are and never written again. The
    page of position consumed - 1 is copied: a continuation writes the drafter's pair there, and
    what follows.

    Attributes:
        consumed: tokens of the row; the slot's prompt goes on from there.
        source_page / target_page: the page that is copied, and the slot's own one.
    """

    slot: int
    epoch: int
    row: int
    consumed: int
    source_page: int
    target_page: int


class LanePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One lane of a decode or speculative round.

    Attributes:
        ceiling: drafts this lane may verify, 0..D; a lane with fewer than D ends in a sample from
            its own last row (contract: S9). Budget and EOS are clipped on the device besides.
        copy_tokens: proposed token per depth, -1 = use the drafter's; at most D entries, q is a
            point mass (S1).
        copy_sources: ProposalSource value per depth, same length as copy_tokens.
        mask_row: first of ceiling + 1 consecutive rows in the round's mask block; -1 =
            unconstrained (contract: K1). Of a shape with a barrier they are written at the barrier.
    """

    slot: int
    epoch: int
    ceiling: int
    copy_tokens: tuple[int, ...] = ()
    copy_sources: tuple[int, ...] = ()
    mask_row: int = -1


class PrefillLane(msgspec.Struct, frozen=True, array_like=True):
    """One lane of a prefill: consumes `tokens` at positions start .. start + len - 1.

    A resume consumes none: its slot was restored after exactly `start` tokens, and the first output
    token is sampled from the head's input that the snapshot holds (contract: M5).

    Attributes:
        final: the chunk ends the prompt: sample the first output token, which becomes pending.
        pending: token to make pending instead of sampling (resume after preemption); -1 = sample.
        mask_row: mask for the first sampled token; -1 = unconstrained.
        next_token: the prompt's token behind the chunk, which a scored prefill scores at the
            chunk's last row; -1 = none.
    """

    slot: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    final: bool
    pending: int = -1
    mask_row: int = -1
    next_token: int = -1


class FreedMemory(msgspec.Struct, frozen=True, array_like=True):
    """What nobody holds any more: the ranks overwrite it, so that a later use shows.

    Attributes:
        pages / rows / slots: page ids; snapshot rows; slots, whose last request has drained.
    """

    pages: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


class RoundPlan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One program execution on every rank. In order: `saves`, `freed`, `inits`, `restores`,
    `grants`, the program, `captures`.

    Attributes:
        round_id: rises by one per plan of this engine.
        lanes: decode or speculative lanes, at most shape.batch_capacity; empty for prefill.
        prefill: prefill lanes, at most shape.batch_capacity, each at most shape.token_capacity
            tokens.
        context_pages: host-known bound: every page-table entry that a lane may touch lies below
            it. Eager programs slice by it; captured ones ignore it.
        mask_block: name of the shared-memory block with mask rows, "" = none (contract: K1).
        mask_rows: int32 rows in that block.
        saves: snapshots of what earlier programs left.
        restores: at most one per slot, each of a slot among `inits`.
        captures: snapshots of the state that this plan's prompt chunks end with.
        freed: under `debug_checks` what is overwritten, and then the rank also compares its state
            with its books after the program; None = neither.
    """

    round_id: int
    shape: GraphShape
    inits: tuple[SlotInit, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    lanes: tuple[LanePlan, ...] = ()
    prefill: tuple[PrefillLane, ...] = ()
    context_pages: int = 0
    mask_block: str = ""
    mask_rows: int = 0
    saves: tuple[SnapshotSave, ...] = ()
    restores: tuple[SlotRestore, ...] = ()
    captures: tuple[SnapshotSave, ...] = ()
    freed: FreedMemory | None = None

    @property
    def copies_alone(self) -> bool:
        """Whether every draft that a lane may offer is a copy, so that no drafter has to propose
        any; of packed rounds never, whose rows its forecasts assign."""
        copied = [lane.copy_tokens[: lane.ceiling] for lane in self.lanes]
        return (
            any(copied)
            and not self.shape.packed_capacity
            and all(
                len(tokens) == lane.ceiling and -1 not in tokens
                for tokens, lane in zip(copied, self.lanes, strict=True)
            )
        )


class MaskAnswer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The host's answer at a barrier: the masks of a round are in its block now (contract: G5).

    Attributes:
        limits: per lane, in plan order, how many of its drafts may be verified: what stands before
            the first one that the grammar forbids, at most the lane's ceiling.
        copies: per lane, tokens that take the places of its drafts from the start on, -1 = the
            draft stays; q is a point mass where one is replaced (S1). () = none anywhere.
    """

    round_id: int
    limits: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...] = ()

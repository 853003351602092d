"""The host's record of one request, from arrival to the return of its resources."""

from __future__ import annotations

import enum
import sys
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.grammar.matcher import GrammarMatcher
from flare_ray.controller.history.copies import RequestCopies
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.prefix import Snapshot
from flare_ray.controller.stops import OutputStops


class Phase(enum.Enum):
    """Where a request stands.

    A constrained one begins in COMPILING: it waits for its grammar, in no queue (contract: K1).
    WAITING -> PREFILL -> DECODE -> ENDED; an end may come from any of them. From PREFILL and DECODE
    a request may be PREEMPTED, and so back to WAITING. An ended or preempted request keeps slot and
    pages until the rounds that reference it have been harvested (contract: T7).
    """

    COMPILING = enum.auto()
    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    PREEMPTED = enum.auto()
    ENDED = enum.auto()


_DECODE = Phase.DECODE
"""A plain name: reading a member from its enumeration costs 0.08 us, several times a round."""


class Unanswered(NamedTuple):
    """One program that has not answered yet, as a bound on what it did to one request.

    Attributes:
        consumes: most tokens it consumes; 0 for a prefill chunk, whose tokens are planned ones.
        emits: least tokens it emits if the request is alive.
    """

    consumes: int
    emits: int


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Host state of one request.

    Attributes:
        uid: engine-unique integer; also the owner of its pages.
        deadline_ns: clock reading at which it is ended with an error; 0 = never.
        slot / epoch: its device slot and that slot's generation; -1 and 0 while waiting.
        limit_pages: pages it can come to touch; never asks for more.
        reserved_pages / granted_pages: pages promised so far / page-table entries written.
        short_pages: pages that its next round lacks.
        chain: its tokens, prompt and output, with the digests of their whole pages.
        snapshot: the prefix it starts from, pinned until its first plan is built.
        cached_tokens: prompt tokens of the prefix it first started from.
        started: its slot has been handed over in a submitted plan.
        prefill_length: tokens to consume before it decodes: its prompt, or after a preemption all
            that it had consumed.
        pending: token that a preempted request goes on with; -1 = the prompt's end is sampled.
        generated_base: tokens generated before the last preemption.
        preemptions: how often it was preempted.
        computed_tokens: most tokens it had consumed at a preemption; what lies below is computed
            again.
        kept: snapshot that its last preemption left.
        planned_tokens: tokens restored or in submitted prefill programs.
        published_tokens: tokens of its slot's publication row; 0 = it holds none of use.
        last_chunk_round: round of its last prefill chunk, or before it was first looked at, for
            turns among prompts; -1 = neither.
        consumed_tokens / generated_tokens: as of the last harvested round.
        in_flight: unanswered programs of this request, in order.
        drafts_offered / drafts_accepted / rounds: totals over harvested rounds.
        copies_offered / copies_accepted: those of the drafts that were copied.
        predicted_offered / predicted_accepted: those of the copies that its client predicted.
        charged_tokens: tokens served that its tenant's counter holds.
        share_start: its tenant's counter when its turn comes, as last estimated; orders the queue.
        emitted: some output has been made visible.
        prompt_scores: of prompt tokens but the first, where the request asked for them.
        scores: of generated tokens that are not visible yet, where the request asked for them.
        sources: likewise `TokenSource`s of generated tokens that are not visible yet.
        matcher: its place in its grammar; None = unconstrained. Used by `MaskWriter` only.
        owed: committed tokens that the matcher has not taken yet.
        copies: what its rounds may copy; None = it has no source.
    """

    request: GenerationRequest
    uid: int
    arrival_ns: int
    deadline_ns: int
    stops: OutputStops
    chain: TokenChain
    phase: Phase = Phase.WAITING
    slot: int = -1
    epoch: int = 0
    limit_pages: int = 0
    reserved_pages: int = 0
    granted_pages: int = 0
    short_pages: int = 0
    snapshot: Snapshot | None = None
    cached_tokens: int = 0
    started: bool = False
    prefill_length: int = 0
    pending: int = -1
    generated_base: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    kept: Snapshot | None = None
    planned_tokens: int = 0
    published_tokens: int = 0
    last_chunk_round: int = -1
    consumed_tokens: int = 0
    generated_tokens: int = 0
    in_flight: deque[Unanswered] = field(default_factory=deque)
    drafts_offered: int = 0
    drafts_accepted: int = 0
    copies_offered: int = 0
    copies_accepted: int = 0
    predicted_offered: int = 0
    predicted_accepted: int = 0
    rounds: int = 0
    first_token_ns: int = 0
    last_delivery_ns: int = 0
    charged_tokens: int = 0
    share_start: float = 0.0
    emitted: bool = False
    scores: deque[TokenScore] = field(default_factory=deque)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    sources: deque[int] = field(default_factory=deque)
    matcher: GrammarMatcher | None = None
    owed: list[int] = field(default_factory=list)
    copies: RequestCopies | None = None

    def __post_init__(self) -> None:
        self.prefill_length = len(self.request.prompt_tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Place among those that run: lower `priority` first, then arrival; kept when preempted."""
        return self.request.priority, self.uid

    @property
    def queue_order(self) -> tuple[int, bool, float, int]:
        """Place in the queue: lower `priority`, then who was preempted, fair shares, arrival."""
        return self.request.priority, not self.preemptions, self.share_start, self.uid

    @property
    def prompt_left(self) -> int:
        """Tokens not yet in a submitted prefill program."""
        return self.prefill_length - self.planned_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens are still to be scored: they must be computed, not restored."""
        scored = len(self.prompt_scores) + 1
        return self.request.prompt_logprobs >= 0 and scored < len(self.request.prompt_tokens)

    @property
    def consumed_bound(self) -> int:
        """Most tokens that can be consumed once every unanswered round has run."""
        bound = max(self.consumed_tokens, self.planned_tokens)
        for program in self.in_flight:
            bound += program.consumes
        return bound

    @property
    def budget_bound(self) -> int:
        """Most tokens that may still be generated after the unanswered rounds; 0 or less = the
        request has certainly ended by then.

        Each unanswered round emits at least one token if the request is alive, and so does the
        chunk that ends a prompt.
        """
        bound = self.request.max_tokens - self.generated_tokens
        for program in self.in_flight:
            bound -= program.emits
        return bound

    @property
    def may_decode(self) -> bool:
        """Whether a further round may find it alive.

        A request that needs the last program's tokens is never in two queued ones.
        """
        if self.phase is not _DECODE or (self.in_flight and self._needs_tokens):
            return False
        return self.budget_bound > 0

    @property
    def _needs_tokens(self) -> bool:
        """Whether its next round follows from the tokens of the last one: masks (contract: K1), or
        what it copies (contract: H2, H3)."""
        return self.matcher is not None or (self.copies is not None and self.copies.on_track)

    @property
    def awaits_tokens(self) -> bool:
        """Its next round follows from an unanswered one's tokens."""
        if not self.in_flight or not self._needs_tokens:
            return False
        return any(program.consumes for program in self.in_flight)

    @property
    def reads_output(self) -> bool:
        """Whether its slot must know every token that was generated so far (contract: K3)."""
        sampling = self.request.sampling
        return bool(
            sampling.bad_words
            or sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )

    @property
    def restored_output(self) -> bytes:
        """As `SlotInit.output` for the tokens that a restore brings to a fresh slot."""
        if not self.reads_output:
            return b""
        output = self.chain.tokens[len(self.request.prompt_tokens) : self.planned_tokens]
        words = array("i", output)
        if sys.byteorder == "big":
            words.byteswap()
        return words.tobytes()

    def take_owed(self) -> list[int]:
        """Tokens that the matcher is given now."""
        owed, self.owed = self.owed, []
        return owed

    def set_back(self) -> None:
        """Return to the queue after a preemption whose rounds have drained: what it has consumed is
        its prompt from now on, its pending token the first one that it goes on with."""
        decoded = self.started and not self.prompt_left and self.generated_tokens > 0
        if self.started:
            self.computed_tokens = max(self.computed_tokens, self.consumed_tokens)
        if decoded:
            self.prefill_length = self.consumed_tokens
            self.pending = self.chain.tokens[self.consumed_tokens]
            self.generated_base = self.generated_tokens
        self.phase = Phase.WAITING
        self.preemptions += 1
        self.share_start = 0.0
        self.started = False
        self.reserved_pages = self.granted_pages = self.short_pages = 0
        self.planned_tokens = self.consumed_tokens = self.published_tokens = 0
        self.last_chunk_round = -1

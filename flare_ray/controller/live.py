"""The host's record of one request, from arrival to the return of its resources."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from flare_ray.contracts.record import TokenScore
from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.prefix import Snapshot
from flare_ray.controller.stops import OutputStops


class Phase(enum.Enum):
    """Where a request stands.

    WAITING -> PREFILL -> DECODE -> ENDED; an end may come from any of them. An ended request keeps
    slot and pages until the rounds that reference it have been harvested (contract: T7).
    """

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Host state of one request.

    Attributes:
        uid: engine-unique integer; also the owner of its pages.
        deadline_ns: clock reading at which it is ended with an error; 0 = never.
        slot / epoch: its device slot and that slot's generation; -1 and 0 while waiting.
        reserved_pages / granted_pages: pages promised at admission / page-table entries written.
        chain: its tokens, prompt and output, with the digests of their whole pages.
        snapshot: the prefix it starts from, pinned until its first plan is built.
        cached_tokens: tokens of that prefix.
        started: its slot has been handed over in a submitted plan.
        planned_tokens: prompt tokens restored or in submitted prefill programs.
        last_chunk_round: round of its last prefill chunk, for turns among prompts; -1 = none.
        consumed_tokens / generated_tokens: as of the last harvested round.
        in_flight: for each unanswered round of this request, in order, the most tokens it may
            consume: ceiling + 1, or 0 for a prefill chunk (its tokens are in planned_tokens).
        drafts_offered / drafts_accepted / rounds: totals over harvested rounds.
        emitted: some output has been made visible.
        scores: of generated tokens that are not visible yet, where the request asked for them.
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
    reserved_pages: int = 0
    granted_pages: int = 0
    snapshot: Snapshot | None = None
    cached_tokens: int = 0
    started: bool = False
    planned_tokens: int = 0
    last_chunk_round: int = -1
    consumed_tokens: int = 0
    generated_tokens: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    drafts_offered: int = 0
    drafts_accepted: int = 0
    rounds: int = 0
    first_token_ns: int = 0
    last_delivery_ns: int = 0
    emitted: bool = False
    scores: deque[TokenScore] = field(default_factory=deque)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens not yet in a submitted program."""
        return len(self.request.prompt_tokens) - self.planned_tokens

    @property
    def consumed_bound(self) -> int:
        """Most tokens that can be consumed once every unanswered round has run."""
        return max(self.consumed_tokens, self.planned_tokens) + sum(self.in_flight)

    @property
    def budget_bound(self) -> int:
        """Most tokens that may still be generated after the unanswered rounds; 0 or less = the
        request has certainly ended by then.

        Each unanswered round emits at least one token if the request is alive. A prefill chunk
        counts only where it ends the prompt.
        """
        unanswered = len(self.in_flight)
        if self.consumed_tokens < len(self.request.prompt_tokens):
            rounds = sum(1 for tokens in self.in_flight if tokens)
            unanswered = rounds + (self.prompt_left == 0)
        return self.request.max_tokens - self.generated_tokens - unanswered

    @property
    def may_decode(self) -> bool:
        """Whether a further round may find it alive."""
        return self.phase is Phase.DECODE and self.budget_bound > 0

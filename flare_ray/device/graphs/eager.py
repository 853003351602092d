"""The eager backend: the round's functions called directly, on CPU and for debugging on CUDA
(contract: G6).

It keeps the catalog, the padding and the static buffers of a captured backend. It differs in what
host-known choices follow: the plan at hand, where a captured program fixes them (variants.py). On
CPU a round that has met the same choices before is replayed from a recording (replays.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.shapes import PROMPT_KINDS, GraphShape
from flare_ray.device.graphs.arena import Arena
from flare_ray.device.graphs.body import PromptBody, RoundBody
from flare_ray.device.graphs.catalog import refuse_unbuilt
from flare_ray.device.graphs.program import Prices, Program, not_prepared, priced
from flare_ray.device.graphs.replays import Replays, coarse
from flare_ray.device.speculation.inputs import FilterBounds, HostFacts, LaneBounds, LaneField
from flare_ray.device.speculation.record import write_idle_record
from flare_ray.device.speculation.round import Drafted, Model
from flare_ray.device.state.layout import Core, Phase
from flare_ray.errors import ContractViolation

T = TypeVar("T")
WARM_PAGES = 2
"""Page-table columns in view during warm-up: one more than one page, so gathers see two."""
PRICED_RUNS = 3
"""Odd. A price that one disturbed run made would rule for many rounds."""
ALL_FILTERS = FilterBounds(
    max_top_k=1,
    every_lane_greedy=False,
    any_top_p=True,
    any_min_p=True,
    any_penalty=True,
    max_rules=1,
    max_bad_words=1,
    max_top_logprobs=1,
    any_coupled=True,
    max_prompt_logprobs=1,
)


def usual_filters(manifest: PreparedManifest) -> FilterBounds:
    """Bounds of lanes whose requests leave sampling to the deployment."""
    defaults = manifest.sampling_defaults
    greedy = defaults.temperature == 0.0 or defaults.top_k == 1
    always = defaults.reproducible == "always"
    return FilterBounds(
        max_top_k=1 if greedy else max(defaults.top_k, 0),
        every_lane_greedy=greedy,
        any_top_p=not greedy and defaults.top_p < 1.0,
        any_min_p=not greedy and defaults.min_p > 0.0,
        any_coupled=always,
        every_lane_coupled=always,
        processed_logprobs=manifest.processed_logprobs,
    )


class EagerRound:
    """A decode or speculative program.

    Args:
        replays: where its recordings are kept; None = every run is plain.
        usual: bounds of a request that leaves sampling to the checkpoint, for `price_ns`.
    """

    def __init__(
        self,
        model: Model,
        shape: GraphShape,
        arena: Arena,
        replays: Replays | None,
        usual: FilterBounds,
    ) -> None:
        self.shape = shape
        self.is_usual = True
        self._usual = usual
        self._replays = replays
        self._body = body = RoundBody(model, shape, arena)
        self.record, self.scores, self.prompt_scores = body.record, body.scores, body.prompt_scores
        self._request = model.store.request
        self._columns = model.store.limits.table_columns
        self._facts: HostFacts | None = None
        self._drafted: Drafted | None = None

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """See `Program`."""
        self._body.fill(plan, masks)
        self._drafted = None
        self.is_usual = True
        self._facts = self._coarse(self._body.facts(plan, masks, bounds))

    def draft(self) -> Tensor:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("drafts before prepare")
        draft = partial(self._body.draft, self._facts)
        self._drafted = self._play(("draft", self.shape, self._facts), draft)
        return self._drafted.candidates.drafts

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """See `Program`."""
        if self._drafted is None:
            raise ContractViolation("a barrier was answered before its drafts were made")
        self._body.constrain(plan, masks, answer)
        self._drafted.barrier_copies = bool(answer.copies)

    def replay(self) -> None:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("replay before prepare")
        if self.shape.has_barrier:
            if self._drafted is None:
                raise ContractViolation("a masked round was verified without its drafts")
            self._verify(self._drafted, self._facts)
            self._drafted = None
        elif self._is_idle():
            write_idle_record(self.record, self._body.inputs.lanes)
        else:
            self._run(self._facts)

    def _run(self, facts: HostFacts) -> None:
        self._play(("round", self.shape, facts), partial(self._body.run, facts))

    def _verify(self, drafted: Drafted, facts: HostFacts) -> None:
        key = ("verify", self.shape, facts, drafted.barrier_copies)
        self._play(key, partial(self._body.verify, drafted), after=drafted)

    def _play(self, key: Hashable, function: Callable[[], T], *, after: object = None) -> T:
        if self._replays is None:
            return function()
        result = self._replays.run(key, function, after=after)
        self.is_usual = self.is_usual and self._replays.replayed
        return result

    def _coarse(self, facts: HostFacts) -> HostFacts:
        return facts if self._replays is None else coarse(facts, self._columns)

    def _is_idle(self) -> bool:
        """Whether no lane would run: all requests of a round queued behind their last one have
        ended. The state lies in host memory, so a look at it costs no wait; every rank's is equal,
        so all of them skip alike. A captured program runs such a round for nothing."""
        core = self._request.core
        if core.device.type != "cpu":
            return False
        planned, slots = self._body.inputs.lanes.numpy(), core.numpy()
        held = slots[planned[:, LaneField.SLOT]]
        live = held[:, Core.PHASE] == Phase.READY.value
        return not (live & (held[:, Core.EPOCH] == planned[:, LaneField.EPOCH])).any()

    def warm(self) -> None:
        """See `Program`."""
        self._body.idle()
        self._body.run(self._warm_facts(ALL_FILTERS, copies=self.shape.draft_tokens > 0))

    def price_ns(self) -> int:
        """Median time of a few runs on padded lanes without optional steps; leaves a recording,
        which serves requests of the usual kind as long as they are short."""
        self._body.idle()
        facts = self._coarse(self._warm_facts(self._usual, copies=False))
        if self._replays is not None:
            # Plain, then recorded; what lies behind a barrier one run later.
            for _ in range(3 if self.shape.has_barrier else 2):
                self._run_parts(facts)
        took = []
        for _ in range(PRICED_RUNS):
            started = time.perf_counter_ns()
            self._run_parts(facts)
            self.record.tolist()  # on a device: waits for it
            took.append(time.perf_counter_ns() - started)
        return sorted(took)[PRICED_RUNS // 2]

    def _run_parts(self, facts: HostFacts) -> None:
        """Everything on both sides of a barrier, without the host's part between them."""
        if not self.shape.has_barrier:
            self._run(facts)
            return
        drafted = self._play(("draft", self.shape, facts), partial(self._body.draft, facts))
        drafted.barrier_copies = False
        self._verify(drafted, facts)

    def _warm_facts(self, filters: FilterBounds, *, copies: bool) -> HostFacts:
        shape, columns = self.shape, min(WARM_PAGES, self._columns)
        return HostFacts(columns, shape.verify_width, shape.masked, copies, True, filters)


class EagerPrefill:
    """A prefill program, or a resume."""

    is_usual = True

    def __init__(self, model: Model, shape: GraphShape, arena: Arena) -> None:
        self.shape = shape
        self._body = body = PromptBody(model, shape, arena)
        self.record, self.scores, self.prompt_scores = body.record, body.scores, body.prompt_scores
        self._columns = model.store.limits.table_columns
        self._facts: HostFacts | None = None

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """See `Program`."""
        self._facts = self._body.facts(plan, masks, bounds)
        self._body.fill(plan, masks if self._facts.masked else None)

    def replay(self) -> None:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("replay before prepare")
        self._body.run(self._facts)

    def warm(self) -> None:
        """See `Program`."""
        self._body.idle()
        columns = min(WARM_PAGES, self._columns)
        self._body.run(
            HostFacts(columns, self.shape.token_capacity, True, False, True, ALL_FILTERS)
        )

    def draft(self) -> Tensor:
        """See `Program`; a prompt has no drafts."""
        raise ContractViolation("a prefill has no barrier")

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """See `Program`."""
        raise ContractViolation("a prefill has no barrier")


class EagerBackend:
    """Every program of the manifest over one arena, see `Backend`; `model` is what they run."""

    def __init__(self, model: Model, manifest: PreparedManifest, *, replays: bool = True) -> None:
        refuse_unbuilt(manifest.shapes)
        self.model = model
        self.pool_bytes = 0
        self.arena = Arena(manifest)
        held = Replays() if replays and manifest.device == "cpu" else None
        usual = usual_filters(manifest)
        self._programs: dict[GraphShape, Program] = {
            shape: EagerPrefill(model, shape, self.arena)
            if shape.kind in PROMPT_KINDS
            else EagerRound(model, shape, self.arena, held, usual)
            for shape in manifest.shapes
        }

    def program(self, shape: GraphShape) -> Program:
        """See `Backend`."""
        program = self._programs.get(shape)
        if program is None:
            raise not_prepared(shape, len(self._programs))
        return program

    def warm(self) -> None:
        """See `Backend`."""
        for program in self._programs.values():
            program.warm()

    def prices(self, *, masked: bool) -> Prices:
        """See `Backend`."""
        rounds = {s: p for s, p in self._programs.items() if isinstance(p, EagerRound)}
        return priced(rounds, lambda shape: rounds[shape].price_ns(), masked=masked)

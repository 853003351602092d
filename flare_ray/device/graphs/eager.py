"""The eager backend: the round's functions called directly, on CPU and for debugging on CUDA
(contract: G6).

It keeps the catalog, the padding and the static buffers of a captured backend. It differs in two
host-known choices that a captured program fixes at capture: how many page-table columns and
prompt rows are in view, and which optional steps (masks, copies, filters) the plan's lanes need.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import RECORD_FIELDS
from flare_ray.contracts.shapes import PROMPT_KINDS, GraphKind, GraphShape
from flare_ray.device.graphs.catalog import lane_input_shape, scratch_sizes, shape_problem
from flare_ray.device.graphs.program import Program
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.sampling.scores import SCORE_WORDS
from flare_ray.device.speculation.inputs import (
    FilterBounds,
    HostFacts,
    LaneBounds,
    LaneField,
    PrefillInputs,
    RoundInputs,
    StaticBuffer,
)
from flare_ray.device.speculation.prefill import PrefillScratch, run_prefill, run_resume
from flare_ray.device.speculation.record import write_idle_record
from flare_ray.device.speculation.round import (
    Drafted,
    Model,
    RoundScratch,
    draft_round,
    run_round,
    verify_round,
)
from flare_ray.device.state.layout import Core, Phase
from flare_ray.errors import ContractViolation

WARM_PAGES = 2
"""Page-table columns in view during warm-up: one more than one page, so gathers see two."""
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


class Arena:
    """Scratch of one rank, shared by all programs: they run one after another, and nothing left
    here is read by the next."""

    def __init__(self, manifest: PreparedManifest) -> None:
        self.sizes = scratch_sizes(manifest.shapes, manifest.vocab_size)
        self.vocab_size = manifest.vocab_size
        device = manifest.device
        self.lanes = StaticBuffer.allocate((self.sizes.lanes,), torch.int64, device)
        self.masks = StaticBuffer.allocate((self.sizes.masks,), torch.int32, device)
        self.q = torch.zeros(self.sizes.q, dtype=torch.float32, device=device)
        self.record = torch.zeros(self.sizes.record, dtype=torch.int64, device=device)
        self.positions = torch.arange(self.sizes.positions, device=device)
        self.scores = torch.zeros(self.sizes.scores, dtype=torch.int32, device=device)
        self.prompt_scores = torch.zeros(self.sizes.prompt_scores, dtype=torch.int32, device=device)

    def record_rows(self, batch: int) -> Tensor:
        """[batch, RECORD_FIELDS] int64."""
        return self.record[: batch * RECORD_FIELDS].view(batch, RECORD_FIELDS)

    def score_rows(self, shape: GraphShape, rows: int) -> Tensor:
        """[B, rows, SCORE_WORDS] int32."""
        size = (shape.batch_capacity, rows, SCORE_WORDS)
        return self.scores[: size[0] * size[1] * size[2]].view(size)

    def prompt_score_rows(self, shape: GraphShape) -> Tensor:
        """[B, T, SCORE_WORDS] int32 of a scored prefill, [B, 0, SCORE_WORDS] of other programs."""
        scored = shape.kind is GraphKind.SCORED_PREFILL
        size = (shape.batch_capacity, shape.token_capacity * scored, SCORE_WORDS)
        return self.prompt_scores[: size[0] * size[1] * size[2]].view(size)

    def q_rows(self, shape: GraphShape) -> Tensor:
        """[B, D, V] float32."""
        size = (shape.batch_capacity, shape.draft_tokens, self.vocab_size)
        return self.q[: size[0] * size[1] * size[2]].view(size)

    def mask_rows(self, shape: GraphShape, rows: int) -> StaticBuffer:
        """[B, rows, words] int32."""
        return self.masks.view((shape.batch_capacity, rows, mask_words(self.vocab_size)))

    def poison(self) -> None:
        """Fill everything a program must not read before writing it; for tests (contract: G4)."""
        with torch.inference_mode():
            self.q.fill_(float("nan"))
            self.record.fill_(-(2**40))
            self.masks.tensor.fill_(0x5A5A5A5A)
            self.lanes.tensor.fill_(2**40)
            self.scores.fill_(0x5A5A5A5A)
            self.prompt_scores.fill_(0x5A5A5A5A)


class EagerRound:
    """A decode or speculative program."""

    def __init__(self, model: Model, shape: GraphShape, arena: Arena) -> None:
        request = model.store.request
        self.shape = shape
        self.record = arena.record_rows(shape.batch_capacity)
        self._model = model
        self._inputs = RoundInputs(
            arena.lanes.view(lane_input_shape(shape)),
            arena.mask_rows(shape, shape.verify_width),
            request.null_slot,
        )
        positions = arena.positions[: shape.verify_width].unsqueeze(0)
        self.scores = arena.score_rows(shape, shape.verify_width)
        self.prompt_scores = arena.prompt_score_rows(shape)
        self._scratch = RoundScratch(arena.q_rows(shape), self.record, positions, self.scores)
        self._columns = model.store.limits.table_columns
        self._facts: HostFacts | None = None
        self._drafted: Drafted | None = None

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """See `Program`."""
        masked = self.shape.masked
        self._inputs.fill(plan, masks if masked and not self.shape.has_barrier else None)
        self._drafted = None
        self._facts = HostFacts(
            context_pages=bounds.context_pages,
            rows=self.shape.verify_width,
            masked=masked,
            copies=any(lane.copy_tokens for lane in plan.lanes),
            sampled=True,
            filters=bounds.filters,
            publishes=bounds.publishes,
        )

    def draft(self) -> Tensor:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("drafts before prepare")
        drafted = draft_round(self._model, self.shape, self._inputs, self._scratch, self._facts)
        self._drafted = drafted
        return drafted.candidates.drafts

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """See `Program`."""
        if self._drafted is None:
            raise ContractViolation("a barrier was answered before its drafts were made")
        self._inputs.constrain(plan, masks, answer)
        self._drafted.barrier_copies = bool(answer.copies)

    def replay(self) -> None:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("replay before prepare")
        if self.shape.has_barrier:
            if self._drafted is None:
                raise ContractViolation("a masked round was verified without its drafts")
            verify_round(self._model, self.shape, self._inputs, self._scratch, self._drafted)
            self._drafted = None
        elif self._is_idle():
            write_idle_record(self.record, self._inputs.lanes)
        else:
            run_round(self._model, self.shape, self._inputs, self._scratch, self._facts)

    def _is_idle(self) -> bool:
        """Whether no lane would run: all requests of a round queued behind their last one have
        ended. The state lies in host memory, so a look at it costs no wait; every rank's is equal,
        so all of them skip alike. A captured program runs such a round for nothing."""
        core = self._model.store.request.core
        if core.device.type != "cpu":
            return False
        planned, slots = self._inputs.lanes.numpy(), core.numpy()
        held = slots[planned[:, LaneField.SLOT]]
        live = held[:, Core.PHASE] == Phase.READY.value
        return not (live & (held[:, Core.EPOCH] == planned[:, LaneField.EPOCH])).any()

    def warm(self) -> None:
        """See `Program`."""
        self._inputs.clear()
        shape, columns = self.shape, min(WARM_PAGES, self._columns)
        facts = HostFacts(
            columns, shape.verify_width, shape.masked, shape.draft_tokens > 0, True, ALL_FILTERS
        )
        run_round(self._model, shape, self._inputs, self._scratch, facts)


class EagerPrefill:
    """A prefill program, or a resume."""

    def __init__(self, model: Model, shape: GraphShape, arena: Arena) -> None:
        request = model.store.request
        self.shape = shape
        self.record = arena.record_rows(shape.batch_capacity)
        self._model = model
        self._inputs = PrefillInputs(
            arena.lanes.view(lane_input_shape(shape)),
            arena.mask_rows(shape, 1),
            request.null_slot,
        )
        positions = arena.positions[: shape.token_capacity].unsqueeze(0)
        self.scores = arena.score_rows(shape, 1)
        self.prompt_scores = arena.prompt_score_rows(shape)
        self._scratch = PrefillScratch(self.record, positions, self.scores, self.prompt_scores)
        self._columns = model.store.limits.table_columns
        self._facts: HostFacts | None = None

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """See `Program`."""
        masked = masks is not None and any(lane.mask_row >= 0 for lane in plan.prefill)
        self._inputs.fill(plan, masks if masked else None)
        self._facts = HostFacts(
            context_pages=bounds.context_pages,
            rows=max(len(lane.tokens) for lane in plan.prefill),
            masked=masked,
            copies=False,
            sampled=any(lane.final and lane.pending < 0 for lane in plan.prefill),
            filters=bounds.filters,
            publishes=bounds.publishes,
        )

    def replay(self) -> None:
        """See `Program`."""
        if self._facts is None:
            raise ContractViolation("replay before prepare")
        run = run_resume if self.shape.kind is GraphKind.RESUME else run_prefill
        run(self._model, self.shape, self._inputs, self._scratch, self._facts)

    def warm(self) -> None:
        """See `Program`."""
        self._inputs.clear()
        columns = min(WARM_PAGES, self._columns)
        self._facts = HostFacts(columns, self.shape.token_capacity, True, False, True, ALL_FILTERS)
        self.replay()
        self._facts = None

    def draft(self) -> Tensor:
        """See `Program`; a prompt has no drafts."""
        raise ContractViolation("a prefill has no barrier")

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """See `Program`."""
        raise ContractViolation("a prefill has no barrier")


class EagerBackend:
    """Every program of the manifest over one arena."""

    def __init__(self, model: Model, manifest: PreparedManifest) -> None:
        problems = [f"{s}: {text}" for s in manifest.shapes if (text := shape_problem(s))]
        if problems:
            raise ContractViolation("the catalog holds shapes not built: " + "; ".join(problems))
        self.arena = Arena(manifest)
        self._programs: dict[GraphShape, Program] = {
            shape: (EagerPrefill if shape.kind in PROMPT_KINDS else EagerRound)(
                model, shape, self.arena
            )
            for shape in manifest.shapes
        }

    def program(self, shape: GraphShape) -> Program:
        """See `Backend`."""
        program = self._programs.get(shape)
        if program is None:
            raise ContractViolation(
                f"{shape} was not prepared; the catalog holds {len(self._programs)} shapes, see "
                "the manifest"
            )
        return program

    def warm(self) -> None:
        """See `Backend`."""
        for program in self._programs.values():
            program.warm()

"""One rank's executor: a round plan in, a completed record out (contract: T5-T7, S6).

The order of one call: check the plan against catalog and slots, apply saves, hand-overs, restores
and grants, copy the plan into static inputs, replay, apply captures, transfer the record, take its
checksum. A plan that is refused has changed nothing. On a device all of this is enqueued on one
stream; the host waits for the record alone, and at a barrier for the drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.record import Field, RoundReply
from flare_ray.contracts.tiers import TierOrder, TierReport
from flare_ray.device.graphs.captured import CapturedBackend
from flare_ray.device.graphs.catalog import scratch_sizes
from flare_ray.device.graphs.eager import EagerBackend
from flare_ray.device.graphs.program import Backend, Program
from flare_ray.device.graphs.recording import CudaRecorder, Recorder
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.sampling.scores import FIRST_ID, FIRST_LOGPROB
from flare_ray.device.speculation.inputs import FilterBounds, LaneBounds
from flare_ray.device.speculation.record import Frame, Frames, stamp_checksums
from flare_ray.device.speculation.round import Model
from flare_ray.device.state.debug import ledger_problems, poison
from flare_ray.device.state.layout import StateLimits
from flare_ray.device.state.ledger import SlotLedger, lanes_of, may_publish
from flare_ray.device.state.snapshot_host import SnapshotArena
from flare_ray.device.state.staging import Staging
from flare_ray.device.state.store import StateStore
from flare_ray.errors import ContractViolation
from flare_ray.recipes.declaration import Drafter, StateSpec, Target

Barrier = Callable[[int, tuple[tuple[int, ...], ...]], MaskAnswer]
"""(round, drafts by lane) -> the host's answer."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a recipe built for one rank; `drafter` is None where no drafting is prepared.

    `recordable` is False where its Python must run every time, as a test does that listens.
    """

    spec: StateSpec
    target: Target
    drafter: Drafter | None
    recordable: bool = True


def state_limits(manifest: PreparedManifest, *, publication: bool = False) -> StateLimits:
    """Sizes of a prepared engine's state; publication rows exist wherever snapshots do."""
    return StateLimits(
        slots=manifest.slots,
        num_pages=manifest.num_pages,
        context_tokens=manifest.context_tokens,
        dtype=manifest.dtype,
        device=manifest.device,
        vocab_size=manifest.vocab_size,
        speculation=manifest.speculation,
        publication=publication,
        snapshot_rows=manifest.snapshot_rows,
    )


class RankExecutor:
    """Executes plans on one rank. Used by one thread.

    Args:
        manifest: what to prepare; its shapes are the catalog.
        parts: the recipe's spec, target and drafter for this rank.
        rank: rank of the TP group; only rank 0 returns rows.
        publication: keep publication rows (contract: M4).
        recorder: how a captured backend records; None = as CUDA graphs.
        debug_checks: a program that allocates after preparation is a fault; captured backend
            without a host tier only.
    Attributes:
        manifest: as given; priced by `price`.
        backend: its programs.
        store: all persistent state.
        staging: moves snapshots between the device, host memory and disk; None = no host tier.
    Raises:
        ContractViolation: the manifest names a shape that no backend builds, or speculation
            without a drafter.
    """

    def __init__(
        self,
        manifest: PreparedManifest,
        parts: ModelParts,
        *,
        rank: int = 0,
        publication: bool = False,
        recorder: Recorder | None = None,
        debug_checks: bool = False,
    ) -> None:
        if manifest.speculation and parts.drafter is None:
            raise ContractViolation("the manifest prepares speculation, no drafter was built")
        self.manifest = manifest
        self._rank = rank
        with torch.inference_mode():
            limits = state_limits(manifest, publication=publication)
            self.store = StateStore(parts.spec, limits)
            drafter = parts.drafter if manifest.speculation else None
            model = Model(parts.target, drafter, self.store)
            self.backend: Backend
            if manifest.captured:
                recorder = recorder or CudaRecorder()
                # The allocator counts for the process, and moves take memory beside the rounds.
                watches = debug_checks and not manifest.host_cache_bytes
                self.backend = CapturedBackend(model, manifest, recorder, watches=watches)
            else:
                self.backend = EagerBackend(model, manifest, replays=parts.recordable)
            sizes = scratch_sizes(manifest.shapes, manifest.vocab_size)
            self._frames = Frames(
                max(shape.batch_capacity for shape in manifest.shapes),
                manifest.device,
                score_words=sizes.scores,
                prompt_words=sizes.prompt_scores,
            )
        self._ledger = SlotLedger(manifest, limits.table_columns)
        self.staging: Staging | None = None
        if manifest.host_cache_bytes:
            arena = SnapshotArena(self.store, parts.spec, limits, manifest.host_cache_bytes)
            loaded = self._ledger.snapshots.loaded
            self.staging = Staging(arena, rank, manifest.device, loaded)
        self._words = mask_words(manifest.vocab_size)

    def warm(self) -> None:
        """Run every prepared program once on padded lanes, and capture it where the manifest says
        so (contract: G4)."""
        with torch.inference_mode():
            self.backend.warm()

    def price(self, *, masked: bool = True) -> None:
        """Time rounds once more on padded lanes, for the policy: into the manifest; after
        `warm`. masked: see `Backend.prices`."""
        with torch.inference_mode():
            prices = self.backend.prices(masked=masked)
        self.manifest = msgspec.structs.replace(self.manifest, prices=prices)

    def execute(
        self, plan: RoundPlan, masks: np.ndarray | None = None, barrier: Barrier | None = None
    ) -> RoundReply:
        """Run one plan to completion.

        Args:
            masks: [mask_rows, ceil(V / 32)] int32 grammar rows that the plan's lanes point into;
                read behind the barrier where the shape has one.
            barrier: called with the drafts of each lane, answers once `masks` holds the rows behind
                them; None = they hold for all drafts already (a log is replayed, a test).
        Returns:
            The reply; rows on rank 0 only, the checksum on every rank.
        Raises:
            ContractViolation: the plan does not fit the catalog or the slots; nothing was changed.
        """
        program = self.backend.program(plan.shape)
        self._check_masks(masks)
        self._ledger.check(plan, None if masks is None else len(masks))
        with torch.inference_mode():
            self._ledger.apply(plan)
            self._hand_over(plan)
            program.prepare(plan, masks, self._bounds(plan))
            started = time.perf_counter_ns()
            waited = self._pass_barrier(program, plan, masks, barrier)
            program.replay()
            for capture in plan.captures:
                self.store.save(capture)
            frame = self._send(plan, program)
            rows = self._frames.receive(frame)
            elapsed = time.perf_counter_ns() - started - waited
            checksum = stamp_checksums(rows)
            values = rows.tolist()
            scores = self._scores(plan, frame, values)
            prompt_scores = self._prompt_scores(plan, frame)
            self._frames.release(frame)
        self._ledger.complete(plan, values)
        if plan.freed is not None:
            self.check_integrity()
        return RoundReply(
            rank=self._rank,
            round_id=plan.round_id,
            checksum=checksum,
            elapsed_ns=elapsed,
            rows=tuple(v for row in values for v in row) if self._rank == 0 else (),
            scores=scores,
            prompt_scores=prompt_scores,
            is_usual=program.is_usual,
        )

    def order(self, order: TierOrder, report: Callable[[TierReport], None]) -> None:
        """Begin a move of a snapshot; it runs beside the plans that follow.

        Args:
            report: told by another thread how the move went.
        Raises:
            ContractViolation: there is no host tier, or the move cannot be right; nothing was
                changed.
        """
        if self.staging is None:
            raise ContractViolation(f"tier order {order.ticket}: no host tier was prepared")
        self._ledger.begin_order(order)
        with torch.inference_mode():
            for save in order.saves:
                self.store.save(save)
        self.staging.begin(order, report)

    def close(self) -> None:
        """End the staging threads after what they were given; idempotent."""
        if self.staging is not None:
            self.staging.stop()

    def _pass_barrier(
        self,
        program: Program,
        plan: RoundPlan,
        masks: np.ndarray | None,
        barrier: Barrier | None,
    ) -> int:
        """First part of a masked round and the host's answer to it; nanoseconds of the waiting."""
        if not plan.shape.has_barrier:
            return 0
        if masks is None:
            raise ContractViolation(f"round {plan.round_id}: a masked round without a mask block")
        drafts = program.draft()[: len(plan.lanes)].tolist()
        started = time.perf_counter_ns()
        if barrier is None:
            answer = MaskAnswer(plan.round_id, tuple(lane.ceiling for lane in plan.lanes))
        else:
            answer = barrier(plan.round_id, tuple(map(tuple, drafts)))
        if answer.round_id != plan.round_id or len(answer.limits) != len(plan.lanes):
            raise ContractViolation(
                f"round {plan.round_id} of {len(plan.lanes)} lanes got the masks of round "
                f"{answer.round_id} for {len(answer.limits)} lanes"
            )
        waited = time.perf_counter_ns() - started
        program.constrain(plan, masks, answer)
        return waited

    def check_integrity(self) -> None:
        """Compare request state with its invariants and with the ledger; synchronises, for tests
        and debugging.

        Raises:
            ContractViolation: names the slot, field and value.
        """
        with torch.inference_mode():
            self.store.check_integrity()
            problems = list(ledger_problems(self._ledger, self.store))
        if problems:
            raise ContractViolation("the ledger is damaged: " + "; ".join(problems))

    def _hand_over(self, plan: RoundPlan) -> None:
        """State changes between programs, in the order that the plan promises."""
        for save in plan.saves:
            self.store.save(save)
        if plan.freed is not None:
            poison(self.store, plan.freed)
        for init in plan.inits:
            self.store.init_slot(init)
        for restore in plan.restores:
            self.store.restore(restore, keeps_pairs=plan.shape.speculation)
        for grant in plan.grants:
            self.store.grant(grant)

    def _check_masks(self, masks: np.ndarray | None) -> None:
        if masks is None:
            return
        if masks.dtype != np.int32 or masks.ndim != 2 or masks.shape[1] != self._words:
            raise ContractViolation(
                f"mask rows are {masks.dtype} {masks.shape}, expected int32 [rows, {self._words}] "
                f"for a vocabulary of {self.manifest.vocab_size}"
            )

    def _send(self, plan: RoundPlan, program: Program) -> Frame:
        """Begin the way of a program's outputs to the host; scores only where rank 0 answers
        some."""
        lanes = lanes_of(plan)
        scored = not self._rank and max(self._asked(plan)) >= 0
        prompt = not self._rank and program.prompt_scores.shape[1] > 0
        return self._frames.send(
            program.record[: len(lanes)],
            program.scores[: len(lanes)] if scored else None,
            program.prompt_scores if prompt else None,
        )

    def _asked(self, plan: RoundPlan) -> list[int]:
        """Alternatives that each lane's request asked to be scored, -1 = none and no token."""
        return [self._ledger.view(lane.slot).top_logprobs for lane in lanes_of(plan)]

    def _scores(self, plan: RoundPlan, frame: Frame, rows: list[list[int]]) -> tuple[bytes, ...]:
        """Packed scores of the lanes that asked for them, on rank 0."""
        if frame.scores is None:
            return ()
        words = frame.scores.astype("<i4", copy=False)
        return tuple(
            self._packed(words[lane, : row[Field.EMITTED]], top)
            for lane, (top, row) in enumerate(zip(self._asked(plan), rows, strict=True))
        )

    def _prompt_scores(self, plan: RoundPlan, frame: Frame) -> tuple[bytes, ...]:
        """Packed scores of the prompt tokens behind a scored chunk's rows, on rank 0."""
        if frame.prompt_scores is None:
            return ()
        words = frame.prompt_scores.astype("<i4", copy=False)
        return tuple(
            self._packed(
                words[index, : len(lane.tokens) - (lane.next_token < 0)],
                self._ledger.view(lane.slot).prompt_logprobs,
            )
            for index, lane in enumerate(plan.prefill)
        )

    def _packed(self, words: np.ndarray, top: int) -> bytes:
        """Rows [n, SCORE_WORDS] as `unpack_scores` reads them; nothing where nobody asked."""
        if top < 0:
            return b""
        top = min(top, self.manifest.vocab_size)
        ids, logprobs = words[:, FIRST_ID:], words[:, FIRST_LOGPROB:]
        return np.concatenate((words[:, :1], ids[:, :top], logprobs[:, :top]), axis=1).tobytes()

    def _bounds(self, plan: RoundPlan) -> LaneBounds:
        """What the lanes' slots hold now; stale lanes are counted too, they run padded."""
        views = [self._ledger.view(lane.slot) for lane in lanes_of(plan)]
        filters = FilterBounds(
            max_top_k=max(view.top_k for view in views),
            every_lane_greedy=all(view.top_k == 1 for view in views),
            any_top_p=any(view.top_p < 1.0 for view in views),
            any_min_p=any(view.min_p > 0.0 for view in views),
            any_penalty=any(view.penalised for view in views),
            max_rules=max(view.num_rules for view in views),
            max_bad_words=max(view.num_bad_words for view in views),
            any_coupled=any(view.coupled for view in views),
            every_lane_coupled=all(view.coupled for view in views),
            max_top_logprobs=max(view.top_logprobs for view in views),
            max_prompt_logprobs=max(view.prompt_logprobs for view in views),
            processed_logprobs=self.manifest.processed_logprobs,
        )
        return LaneBounds(filters, self._ledger.context_pages(plan), may_publish(plan, views))

"""The captured backend: every program of the catalog as one or two CUDA graphs (contract: G1-G6).

    prepare   static inputs with two page-locked stagings each, outputs, one scratch arena
    tune      where operators register choices; none does today
    warm      every program once on padded lanes, on the recording stream
    capture   largest first into one pool, so that smaller ones fit into what larger ones leave
    freeze    from here on a program allocates nothing; `debug_checks` verifies it at each replay

A masked round is two graphs around the host's answer. What the first leaves for the second stays
referenced, so that nothing recorded later is laid over it.

All programs, hand-overs, snapshots and copies are enqueued on one stream, whose order is all the
synchronisation they need; the host waits only for a record or for the drafts at a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.shapes import PROMPT_KINDS, GraphShape
from flare_ray.device.graphs.arena import Arena
from flare_ray.device.graphs.body import PromptBody, RoundBody
from flare_ray.device.graphs.catalog import refuse_unbuilt
from flare_ray.device.graphs.program import Prices, not_prepared, priced
from flare_ray.device.graphs.recording import Graph, Recorder, Run
from flare_ray.device.graphs.variants import Variant, covers, variants
from flare_ray.device.speculation.inputs import LaneBounds
from flare_ray.device.speculation.round import Drafted, Model
from flare_ray.errors import CapacityError, ConfigError, ContractViolation


@dataclass(slots=True)
class Recording:
    """One variant of a program.

    Attributes:
        parts: its graphs, two where a barrier lies between them.
        drafted: what the first of two parts leaves for the second; the host sees its drafts.
    """

    variant: Variant
    parts: list[Graph] = field(default_factory=list)
    drafted: Drafted | None = None


class CapturedProgram:
    """One catalog entry, see `Program`.

    Args:
        body: its buffers and functions.
        kinds: its variants, cheapest first.
    """

    is_usual = True

    def __init__(
        self, body: RoundBody | PromptBody, kinds: tuple[Variant, ...], recorder: Recorder
    ) -> None:
        self.shape = body.shape
        self.record = body.record
        self.scores = body.scores
        self.prompt_scores = body.prompt_scores
        self.watches = False
        self._body = body
        self._recorder = recorder
        self._recordings = [Recording(kind) for kind in kinds]
        self._chosen: Recording | None = None
        self._has_drafted = False

    def warm(self) -> None:
        """Run every variant once on padded lanes."""
        self._body.idle()
        for recording in self._recordings:
            for run in self._parts(recording):
                self._recorder.warm(run)

    def capture(self) -> None:
        """Record every variant.

        Raises:
            CapacityError: the device has no memory left for it.
            ConfigError: it cannot be recorded.
        """
        self._body.idle()
        for recording in self._recordings:
            try:
                for run in self._parts(recording):
                    recording.parts.append(self._recorder.record(run))
            except torch.cuda.OutOfMemoryError as error:
                raise CapacityError(
                    f"no device memory is left to capture {self.shape}: {error}; lower "
                    "page_pool_tokens, concurrency or prefill_tokens"
                ) from error
            except RuntimeError as error:
                raise ConfigError(
                    f"{self.shape} ({recording.variant.name}) cannot be captured: {error}; "
                    "eager: true runs it uncaptured"
                ) from error

    def price_ns(self) -> int:
        """Device time of its cheapest variant on padded lanes."""
        self._body.idle()
        return sum(self._recorder.time_ns(part) for part in self._recordings[0].parts)

    def prepare(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> None:
        """See `Program`."""
        needed = self._body.facts(plan, masks, bounds)
        self._has_drafted = False
        for recording in self._recordings:
            if covers(recording.variant.facts, needed):
                self._chosen = recording
                break
        else:
            raise ContractViolation(f"round {plan.round_id}: no capture of {plan.shape} covers it")
        self._body.fill(plan, masks if needed.masked else None)

    @property
    def variant(self) -> str:
        """Name of the variant that the prepared plan gets, "" before one."""
        return "" if self._chosen is None else self._chosen.variant.name

    def draft(self) -> Tensor:
        """See `Program`."""
        chosen = self._prepared()
        if not self.shape.has_barrier or chosen.drafted is None:
            raise ContractViolation(f"{self.shape} has no barrier")
        self._run(chosen.parts[0])
        self._has_drafted = True
        return chosen.drafted.candidates.drafts

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """See `Program`."""
        if not self._has_drafted or not isinstance(self._body, RoundBody):
            raise ContractViolation("a barrier was answered before its drafts were made")
        self._body.constrain(plan, masks, answer)

    def replay(self) -> None:
        """See `Program`."""
        chosen = self._prepared()
        if self.shape.has_barrier and not self._has_drafted:
            raise ContractViolation("a masked round was verified without its drafts")
        self._has_drafted = False
        self._run(chosen.parts[-1])

    def _prepared(self) -> Recording:
        if self._chosen is None:
            raise ContractViolation("replay before prepare")
        return self._chosen

    def _run(self, graph: Graph) -> None:
        if not self.watches:
            graph.replay()
            return
        before = self._recorder.allocated_bytes()
        graph.replay()
        taken = self._recorder.allocated_bytes() - before
        if taken:
            raise ContractViolation(f"{self.shape} allocated {taken} bytes after it was frozen")

    def _parts(self, recording: Recording) -> tuple[Run, ...]:
        """What is recorded, in order."""
        body, facts = self._body, recording.variant.facts
        if not self.shape.has_barrier or not isinstance(body, RoundBody):
            return (lambda: body.run(facts),)

        def draft() -> None:
            drafted = body.draft(facts)
            # The answer may replace drafts; where it does not, its fields say so on the device.
            drafted.barrier_copies = True
            recording.drafted = drafted

        def verify() -> None:
            assert recording.drafted is not None
            body.verify(recording.drafted)

        return draft, verify


class CapturedBackend:
    """Every program of the manifest over one arena and one pool, see `Backend`.

    Args:
        watches: compare the allocator's count around every replay.
    Attributes:
        model: what its programs run.
        arena: inputs, outputs and scratch that they share.
        pool_bytes: of the graphs' intermediates, once captured.
    """

    def __init__(
        self,
        model: Model,
        manifest: PreparedManifest,
        recorder: Recorder,
        *,
        watches: bool = False,
    ) -> None:
        refuse_unbuilt(manifest.shapes)
        self.model = model
        self.arena = Arena(manifest)
        self.pool_bytes = 0
        self._recorder = recorder
        self._watches = watches
        columns = model.store.limits.table_columns
        self._programs = {
            shape: CapturedProgram(
                (PromptBody if shape.kind in PROMPT_KINDS else RoundBody)(model, shape, self.arena),
                variants(shape, manifest, columns),
                recorder,
            )
            for shape in manifest.shapes
        }

    def program(self, shape: GraphShape) -> CapturedProgram:
        """See `Backend`."""
        program = self._programs.get(shape)
        if program is None:
            raise not_prepared(shape, len(self._programs))
        return program

    def warm(self) -> None:
        """Warm, capture and freeze everything."""
        ordered = sorted(self._programs.values(), key=lambda program: -_rows(program.shape))
        for program in ordered:
            program.warm()
        for program in ordered:
            program.capture()
        self.pool_bytes = self._recorder.finish()
        for program in ordered:
            program.watches = self._watches

    def prices(self, *, masked: bool) -> Prices:
        """See `Backend`."""
        rounds = {s: p for s, p in self._programs.items() if s.kind not in PROMPT_KINDS}
        return priced(rounds, lambda shape: rounds[shape].price_ns(), masked=masked)


def _rows(shape: GraphShape) -> int:
    return shape.batch_capacity * shape.token_capacity

"""What a backend runs: one shape's static buffers and the round's functions over them.

Both backends share it. They differ in who calls it: the eager one per plan, with the facts of that
plan; the captured one a few times at preparation, with facts that hold for many plans.
"""

from __future__ import annotations

import numpy as np

from flare_ray.contracts.plan import MaskAnswer, RoundPlan
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.device.graphs.arena import Arena
from flare_ray.device.graphs.catalog import lane_input_shape
from flare_ray.device.speculation.inputs import HostFacts, LaneBounds, PrefillInputs, RoundInputs
from flare_ray.device.speculation.prefill import PrefillScratch, run_prefill, run_resume
from flare_ray.device.speculation.round import (
    Drafted,
    Model,
    RoundScratch,
    draft_round,
    run_round,
    verify_round,
)


class RoundBody:
    """A decode or speculative program.

    Attributes:
        shape, record, scores, prompt_scores: as `Program`'s.
        inputs: lanes and masks.
    """

    def __init__(self, model: Model, shape: GraphShape, arena: Arena) -> None:
        self.shape = shape
        self.record = arena.record_rows(shape.batch_capacity)
        self.scores = arena.score_rows(shape, shape.verify_width)
        self.prompt_scores = arena.prompt_score_rows(shape)
        self.inputs = RoundInputs(
            arena.lanes.view(lane_input_shape(shape)),
            arena.mask_rows(shape, shape.verify_width),
            model.store.request.null_slot,
        )
        positions = arena.positions[: shape.verify_width].unsqueeze(0)
        self._scratch = RoundScratch(arena.q_rows(shape), self.record, positions, self.scores)
        self._model = model

    def facts(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> HostFacts:
        """What `plan` needs of a program."""
        return HostFacts(
            context_pages=bounds.context_pages,
            rows=self.shape.verify_width,
            masked=self.shape.masked,
            copies=any(lane.copy_tokens for lane in plan.lanes),
            sampled=True,
            filters=bounds.filters,
            publishes=bounds.publishes,
            drafts=not plan.copies_alone,
        )

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in; a barrier's masks come later."""
        given = masks if self.shape.masked and not self.shape.has_barrier else None
        self.inputs.fill(plan, given)

    def idle(self) -> None:
        """Padded lanes only, which change no slot."""
        self.inputs.clear()
        self.inputs.upload()

    def constrain(self, plan: RoundPlan, masks: np.ndarray, answer: MaskAnswer) -> None:
        """Copy the answer at a barrier in."""
        self.inputs.constrain(plan, masks, answer)

    def run(self, facts: HostFacts) -> None:
        """The whole round."""
        run_round(self._model, self.shape, self.inputs, self._scratch, facts)

    def draft(self, facts: HostFacts) -> Drafted:
        """What lies in front of a barrier."""
        return draft_round(self._model, self.shape, self.inputs, self._scratch, facts)

    def verify(self, drafted: Drafted) -> None:
        """What lies behind it."""
        verify_round(self._model, self.shape, self.inputs, self._scratch, drafted)


class PromptBody:
    """A prefill, a scored one, or a resume; attributes as `RoundBody`'s."""

    def __init__(self, model: Model, shape: GraphShape, arena: Arena) -> None:
        self.shape = shape
        self.record = arena.record_rows(shape.batch_capacity)
        self.scores = arena.score_rows(shape, 1)
        self.prompt_scores = arena.prompt_score_rows(shape)
        self.inputs = PrefillInputs(
            arena.lanes.view(lane_input_shape(shape)),
            arena.mask_rows(shape, 1),
            model.store.request.null_slot,
        )
        positions = arena.positions[: shape.token_capacity].unsqueeze(0)
        self._scratch = PrefillScratch(self.record, positions, self.scores, self.prompt_scores)
        self._model = model
        self._run = run_resume if shape.kind is GraphKind.RESUME else run_prefill

    def facts(self, plan: RoundPlan, masks: np.ndarray | None, bounds: LaneBounds) -> HostFacts:
        """As `RoundBody.facts`."""
        return HostFacts(
            context_pages=bounds.context_pages,
            rows=max(len(lane.tokens) for lane in plan.prefill),
            masked=masks is not None and any(lane.mask_row >= 0 for lane in plan.prefill),
            copies=False,
            sampled=any(lane.final and lane.pending < 0 for lane in plan.prefill),
            filters=bounds.filters,
            publishes=bounds.publishes,
        )

    def fill(self, plan: RoundPlan, masks: np.ndarray | None) -> None:
        """Copy a checked plan in."""
        self.inputs.fill(plan, masks)

    def idle(self) -> None:
        """As `RoundBody.idle`."""
        self.inputs.clear()
        self.inputs.upload()

    def run(self, facts: HostFacts) -> None:
        """The whole program."""
        self._run(self._model, self.shape, self.inputs, self._scratch, facts)

"""One rank's model on random weights, and rounds of one shape cut into the parts that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rounds.weights import RandomWeights
from flare_ray.contracts.record import RECORD_FIELDS
from flare_ray.contracts.shapes import PAGE_TOKENS, GraphKind, GraphShape
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.sampling.scores import SCORE_WORDS
from flare_ray.device.speculation import round as stages
from flare_ray.device.speculation.inputs import (
    FilterBounds,
    HostFacts,
    LaneField,
    RoundInputs,
    StaticBuffer,
)
from flare_ray.device.speculation.round import Model, RoundScratch
from flare_ray.device.state.layout import KEYS, Core, Phase, Sampling, StateLimits
from flare_ray.device.state.store import TORCH_DTYPE, StateStore
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.recipes.declaration import BuildOptions
from flare_ray.recipes.glm5_next.drafter import build_drafter
from flare_ray.recipes.glm5_next.geometry import Geometry
from flare_ray.recipes.glm5_next.state import state_spec
from flare_ray.recipes.glm5_next.target import build_target
from flare_ray.recipes.glm5_next.weights import manifest

MAX_WIDTH = 8
PARTS = ("draft", "verify", "sampler", "commit")


@dataclass(slots=True)
class Rank:
    """A model with slots that are all in the middle of a request."""

    geometry: Geometry
    model: Model
    pages: int
    core: torch.Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is built, and in which activation type."""

    device: str = "cuda"
    dtype: str = "bfloat16"


def build_rank(
    shape: Geometry,
    experts: WeightFormat,
    *,
    slots: int,
    context: int,
    place: Placement = Placement(),
) -> Rank:
    """Target, drafter and state; every slot has consumed `context` tokens."""
    weights = RandomWeights(
        manifest(shape), experts=experts, device=place.device, dtype=TORCH_DTYPE[place.dtype]
    )
    options = BuildOptions(
        device=place.device, dtype=place.dtype, prefill_tokens=512, max_width=MAX_WIDTH
    )
    comm = SingleGroup()
    target = build_target(shape, weights, comm, options)  # type: ignore[arg-type]
    drafter = build_drafter(shape, weights, comm, options)  # type: ignore[arg-type]
    pages = -(-(context + 2 * MAX_WIDTH) // PAGE_TOKENS)
    limits = StateLimits(
        slots=slots,
        num_pages=slots * pages + 1,
        context_tokens=pages * PAGE_TOKENS,
        dtype=place.dtype,
        device=place.device,
        vocab_size=shape.vocab_size,
        speculation=True,
    )
    store = StateStore(state_spec(shape, 1), limits)
    for name, tensor in store.groups.items():
        if not name.endswith("recurrent"):
            tensor.normal_()
    _start(store, slots=slots, pages=pages, context=context)
    return Rank(shape, Model(target, drafter, store), pages, store.request.core.clone())


def _start(store: StateStore, *, slots: int, pages: int, context: int) -> None:
    core, request = store.request.core, store.request
    core[:slots, Core.EPOCH] = 1
    core[:slots, Core.PHASE] = Phase.READY.value
    # lanes of one history would all choose the same experts
    pending = 7 + 4_789 * torch.arange(slots, device=core.device)
    core[:slots, Core.PENDING] = pending % store.limits.vocab_size
    core[:slots, Core.CONSUMED] = context
    core[:slots, Core.BUDGET] = 1 << 20
    core[:slots, Core.DRAFT_POSITION] = store.spec.absorbed(context)
    core[:slots, KEYS] = torch.randint_like(core[:slots, KEYS], 1, 1 << 40)
    core[:slots, Core.EOS :] = -1
    request.sampling[:slots, Sampling.TOP_P] = 0.95
    table = torch.arange(slots * pages, device=core.device).view(slots, pages) + 1
    request.page_table[:slots, :pages] = table


class TimedRound:
    """A round of B lanes and W rows.

    Args:
        rank: whose slots 0 .. B - 1 run.
        batch / width: B, W; W - 1 drafts are made.
    """

    def __init__(self, rank: Rank, *, batch: int, width: int) -> None:
        model, vocabulary = rank.model, rank.geometry.vocab_size
        device = model.store.limits.device
        self._model = model
        self.shape = GraphShape(
            kind=GraphKind.SPECULATIVE,
            batch_capacity=batch,
            token_capacity=width,
            draft_tokens=width - 1,
            verify_width=width,
        )
        columns = LaneField.COPIES + width - 1
        lanes = StaticBuffer.allocate(batch * columns, torch.int64, device).view((batch, columns))
        words = mask_words(vocabulary)
        masks = StaticBuffer.allocate(batch * width * words, torch.int32, device)
        self._inputs = RoundInputs(
            lanes, masks.view((batch, width, words)), model.store.request.null_slot
        )
        self._inputs.clear()
        host = lanes.host
        host[:, LaneField.SLOT] = range(batch)
        host[:, LaneField.EPOCH] = 1
        host[:, LaneField.CEILING] = width - 1
        lanes.upload()
        made: dict[str, Any] = {"device": device}
        self._scratch = RoundScratch(
            torch.zeros((batch, width - 1, vocabulary), **made),
            torch.zeros((batch, RECORD_FIELDS), dtype=torch.int64, **made),
            torch.arange(width, **made).unsqueeze(0),
            torch.zeros((batch, width, SCORE_WORDS), dtype=torch.int32, **made),
        )
        self._facts = HostFacts(
            context_pages=rank.pages,
            rows=width,
            masked=False,
            copies=False,
            sampled=True,
            filters=FilterBounds(any_top_p=True),
            publishes=False,
        )
        self._saved = rank.core

    def restore(self) -> None:
        """Put the slots back to where the round started."""
        self._model.store.request.core.copy_(self._saved)

    def run(self) -> None:
        """The whole round, as the engine calls it."""
        stages.run_round(self._model, self.shape, self._inputs, self._scratch, self._facts)

    def upto(self, part: str) -> Callable[[], object]:
        """The round's stages through `part`, one of PARTS."""
        return {
            "draft": self._drafted,
            "verify": self._verified,
            "sampler": self._sampled,
            "commit": self.run,
        }[part]

    def _drafted(self) -> stages.Drafted:
        return stages.draft_round(self._model, self.shape, self._inputs, self._scratch, self._facts)

    def _verified(self) -> tuple:
        drafted = self._drafted()
        lanes = drafted.stage.lanes
        rows = stages._verify_rows(lanes, drafted.candidates, self._scratch.positions)
        return drafted, rows, self._model.target.forward(rows, self._model.store.groups)

    def _sampled(self) -> object:
        drafted, rows, output = self._verified()
        stage = drafted.stage
        work = stages._Verification(
            rows, drafted.candidates, stage.lanes, stage.draws, stage.facts, None
        )
        return stages._accept(self._model, output, self._scratch, work)

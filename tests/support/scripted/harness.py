"""A rank with the scripted model, and a driver that plays a controller's part plan by plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from flare_ray.contracts.manifest import ByteBudget, PreparedManifest, SamplingDefaults
from flare_ray.contracts.plan import (
    LanePlan,
    LogitRule,
    PageGrant,
    PrefillLane,
    RoundPlan,
    SlotInit,
)
from flare_ray.contracts.record import LaneRecord, RoundReply, unpack_rows
from flare_ray.contracts.shapes import PAGE_TOKENS, GraphKind, GraphShape
from flare_ray.device.executor import Barrier, ModelParts, RankExecutor, state_limits
from flare_ray.device.graphs.catalog import CatalogOptions, catalog_shapes, scratch_sizes
from flare_ray.device.graphs.recording import Recorder
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.state.layout import pages_for, state_bytes
from flare_ray.recipes.declaration import BuildOptions, Communicator
from tests.support.scripted.drafter import drafter
from tests.support.scripted.geometry import Script
from tests.support.scripted.state import state
from tests.support.scripted.target import target


@dataclass(frozen=True)
class Setup:
    """How a scripted engine is prepared."""

    slots: int = 4
    widths: tuple[int, ...] = tuple(range(1, 9))
    context_tokens: int = 512
    prefill_tokens: int = 64
    ordinary: bool = True
    speculative: bool = True
    publication: bool = False
    snapshot_rows: int = 0
    pool_tokens: int = 0
    token_capacity: int = 1024


def scripted_manifest(script: Script, setup: Setup, *, world_size: int = 1) -> PreparedManifest:
    """A manifest as preparation would make it."""
    shapes = catalog_shapes(
        CatalogOptions(
            concurrency=setup.slots,
            prefill_tokens=setup.prefill_tokens,
            ordinary=setup.ordinary,
            speculative=setup.speculative,
            widths=setup.widths,
            token_capacity=setup.token_capacity,
            resume=setup.snapshot_rows > 0,
            masked=True,
        )
    )
    pool = setup.pool_tokens or setup.slots * setup.context_tokens
    manifest = PreparedManifest(
        recipe="scripted",
        checkpoint_name="scripted",
        world_size=world_size,
        device="cpu",
        dtype="float32",
        vocab_size=script.vocab_size,
        context_tokens=setup.context_tokens,
        page_tokens=PAGE_TOKENS,
        num_pages=pages_for(pool) + setup.slots + 1,
        slots=setup.slots,
        prefill_tokens=setup.prefill_tokens,
        draft_tokens=setup.widths[-1] - 1 if setup.speculative else 0,
        speculation=setup.speculative,
        copy_inputs=True,
        eos_ids=script.eos_ids,
        sampling_defaults=SamplingDefaults(),
        shapes=shapes,
        budget=ByteBudget(
            weights_bytes=0, page_bytes=0, state_bytes=0, graph_pool_bytes=0, scratch_bytes=0
        ),
        threads=1,
        snapshot_rows=setup.snapshot_rows,
    )
    limits = state_limits(manifest, publication=setup.publication)
    page_bytes, rest = state_bytes(state(script, world_size), limits)
    budget = ByteBudget(
        weights_bytes=0,
        page_bytes=page_bytes,
        state_bytes=rest,
        graph_pool_bytes=0,
        scratch_bytes=scratch_sizes(shapes, script.vocab_size).num_bytes,
    )
    return msgspec.structs.replace(manifest, budget=budget)


def scripted_rank(
    script: Script,
    setup: Setup | None = None,
    comm: Communicator | None = None,
    *,
    recorder: Recorder | None = None,
) -> RankExecutor:
    """One rank's executor; with a recorder its programs are recorded, but not warmed yet."""
    setup = setup or Setup()
    comm = comm or SingleGroup()
    options = BuildOptions("cpu", "float32", setup.prefill_tokens, setup.widths[-1])
    with torch.inference_mode():
        parts = ModelParts(
            state(script, comm.size),
            target(script, None, comm, options),
            drafter(script, None, comm, options),
        )
    manifest = scripted_manifest(script, setup, world_size=comm.size)
    manifest = msgspec.structs.replace(manifest, captured=recorder is not None)
    return RankExecutor(
        manifest,
        parts,
        rank=comm.rank,
        publication=setup.publication,
        recorder=recorder,
        debug_checks=True,
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling of one request; the default is greedy."""

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    rules: tuple[LogitRule, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int = -1
    coupled: bool = False


GREEDY = Sampling()


@dataclass
class Request:
    """The driver's record of one request."""

    prompt: tuple[int, ...]
    slot: int
    epoch: int
    uid: int
    budget: int
    sampling: Sampling
    pages: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    records: list[LaneRecord] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.records) and self.records[-1].status > 1


class Driver:
    """Issues plans to one or more ranks and collects records; asserts that all ranks agree.

    Attributes:
        barrier: asked for the masks of every masked round; None = the ones given hold already.
    """

    def __init__(self, *ranks: RankExecutor) -> None:
        self.ranks = ranks
        self.barrier: Barrier | None = None
        self.manifest = ranks[0].manifest
        self.replies: list[tuple[RoundReply, ...]] = []
        self.log: list[tuple[RoundPlan, np.ndarray | None]] = []
        self.round_ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self._uids = itertools.count(1000)
        self._free = list(range(self.manifest.num_pages - 1, 0, -1))

    def shape(
        self, kind: GraphKind, batch: int, width: int, speculation: bool, *, masked: bool = False
    ) -> GraphShape:
        """The smallest prepared shape that holds `batch` lanes."""
        return next(
            s
            for s in self.manifest.shapes
            if s.kind == kind
            and s.batch_capacity >= batch
            and s.masked == masked
            and s.speculation == speculation
            and (kind == GraphKind.PREFILL or s.verify_width == width)
        )

    def submit(self, plan: RoundPlan, masks: np.ndarray | None = None) -> tuple[LaneRecord, ...]:
        """Run a plan on every rank."""
        self.log.append((plan, masks))
        replies = tuple(rank.execute(plan, masks, self.barrier) for rank in self.ranks)
        self.replies.append(replies)
        assert len({reply.checksum for reply in replies}) == 1
        return unpack_rows(replies[0].rows, replies[0].scores, replies[0].prompt_scores)

    def open(
        self,
        prompt: Sequence[int],
        slot: int,
        *,
        budget: int = 16,
        sampling: Sampling = GREEDY,
        eos: Sequence[int] | None = None,
    ) -> tuple[Request, SlotInit, PageGrant]:
        """Reserve pages and an epoch; nothing is sent yet."""
        needed = pages_for(len(prompt) + budget)
        pages = tuple(self._free.pop() for _ in range(needed))
        request = Request(
            tuple(prompt), slot, next(self._epochs), next(self._uids), budget, sampling, pages
        )
        init = SlotInit(
            slot=slot,
            epoch=request.epoch,
            uid=request.uid,
            seed=sampling.seed,
            budget=budget,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            eos_ids=tuple(self.manifest.eos_ids if eos is None else eos),
            repetition=sampling.repetition,
            presence=sampling.presence,
            frequency=sampling.frequency,
            rules=sampling.rules,
            bad_words=sampling.bad_words,
            top_logprobs=sampling.top_logprobs,
            coupled=sampling.coupled,
        )
        return request, init, PageGrant(slot, 0, pages)

    def close(self, request: Request) -> None:
        """Give the request's pages back."""
        self._free.extend(request.pages)

    def prefill(
        self,
        requests: Sequence[tuple[Request, SlotInit, PageGrant]],
        *,
        chunk: int = 0,
        speculation: bool = True,
        pending: int = -1,
    ) -> list[Request]:
        """Consume the prompts of several requests together, `chunk` tokens a program."""
        opened = [r for r, _, _ in requests]
        batch = len(opened)
        shape = self.shape(GraphKind.PREFILL, batch, 0, speculation)
        chunk = min(chunk or shape.token_capacity, shape.token_capacity)
        done = dict.fromkeys(range(batch), 0)
        first = True
        while any(done[i] < len(r.prompt) for i, r in enumerate(opened)):
            indices = [i for i, r in enumerate(opened) if done[i] < len(r.prompt)]
            lanes = []
            for i in indices:
                request = opened[i]
                tokens = request.prompt[done[i] : done[i] + chunk]
                final = done[i] + len(tokens) == len(request.prompt)
                lanes.append(
                    PrefillLane(
                        request.slot,
                        request.epoch,
                        done[i],
                        tokens,
                        final,
                        pending if final else -1,
                    )
                )
                done[i] += len(tokens)
            plan = RoundPlan(
                round_id=next(self.round_ids),
                shape=shape,
                inits=tuple(init for _, init, _ in requests) if first else (),
                grants=tuple(grant for _, _, grant in requests) if first else (),
                prefill=tuple(lanes),
                context_pages=max(pages_for(done[i]) for i in indices),
            )
            first = False
            self._note([opened[i] for i in indices], self.submit(plan))
        return opened

    def round(
        self,
        requests: Sequence[Request],
        width: int,
        *,
        speculation: bool = True,
        lanes: Sequence[LanePlan] | None = None,
        masks: np.ndarray | None = None,
    ) -> tuple[LaneRecord, ...]:
        """One decode or speculative round over `requests` in lane order."""
        kind = GraphKind.SPECULATIVE if speculation else GraphKind.DECODE
        shape = self.shape(kind, len(requests), width, speculation, masked=masks is not None)
        if lanes is None:
            lanes = [LanePlan(r.slot, r.epoch, width - 1) for r in requests]
        plan = RoundPlan(
            round_id=next(self.round_ids),
            shape=shape,
            lanes=tuple(lanes),
            context_pages=max(len(r.pages) for r in requests),
            mask_block="" if masks is None else "block",
            mask_rows=0 if masks is None else len(masks),
        )
        records = self.submit(plan, masks)
        self._note(requests, records)
        return records

    def _note(self, requests: Sequence[Request], records: Sequence[LaneRecord]) -> None:
        for request, record in zip(requests, records, strict=True):
            if record.status:
                request.records.append(record)
                request.tokens.extend(record.tokens)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        width: int = 4,
        slot: int = 0,
        budget: int = 16,
        sampling: Sampling = GREEDY,
        speculation: bool = True,
    ) -> Request:
        """One request alone, to its end."""
        opened = self.open(prompt, slot, budget=budget, sampling=sampling)
        (request,) = self.prefill([opened], speculation=speculation)
        while not request.ended:
            self.round([request], width, speculation=speculation)
        self.close(request)
        return request

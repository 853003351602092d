"""A whole engine under random use, compared with every request alone (contract: M4, M7, V).

`EngineMachine` is a hypothesis state machine over a controller and one rank in this process. Its
rules are what clients and page pressure do. At the end of an example every request that was not
cancelled has the text, and every row that was ever computed for it, by target and drafter, the
logits of a cold run of that request alone on a fresh rank.

To cover more, derive a class and add rules, as `tier_machine` does for moves between tiers;
`engine`, `cold`, `controller` and `channel` are theirs to use, and `teardown` compares whatever
they did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flare_ray.actors.wire import encode_plan
from flare_ray.config import EngineConfig, PrefixCacheConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.plan import RoundPlan
from flare_ray.contracts.record import Status, unpack_rows
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.tiers import TierOrder, TierOutcome
from flare_ray.controller.loop import Controller
from flare_ray.controller.ports import RoundResult
from flare_ray.controller.verification import FixedPolicy
from flare_ray.device.executor import ModelParts, RankExecutor
from flare_ray.device.parallel.groups import SingleGroup
from flare_ray.device.prepare import _build, make_plan
from flare_ray.metrics.recorder import Recorder
from tests.support.fake_manifest import CollectingOutput
from tests.support.heard_model import Heard, heard_parts, largest_error

LOGITS_ATOL = 1e-4
"""Bound of the contract for float32."""
CONTEXT_TOKENS = 448
LENGTHS = (1, 2, 3, 4, 5, 11, 12, 13, 63, 64, 65, 127, 128, 129)
"""Around pages, groups of four, and rings of twelve."""
DRAFTS = 3
GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)
PENALISED = msgspec.structs.replace(
    GREEDY, repetition_penalty=1.5, frequency_penalty=1.0, bad_words=((5, 6), (9,))
)
Work = tuple[tuple[int, ...], int, SamplingSpec]
"""Prompt, budget, sampling."""


@dataclass
class DirectChannel:
    """`RankChannel` that runs a plan when it is submitted, as an ordered stream would."""

    rank: RankExecutor
    queue_depth: int
    plans: list[RoundPlan] = field(default_factory=list)
    _results: deque[RoundResult] = field(default_factory=deque)

    def submit(self, plan: RoundPlan) -> None:
        assert len(self._results) < self.queue_depth, "too many rounds queued"
        encode_plan(plan)
        reply = self.rank.execute(plan)
        lanes = unpack_rows(reply.rows, reply.scores)
        for lane in lanes:
            if lane.status & Status.ACTIVE:
                pairs = (max(lane.consumed - 1, 0), lane.consumed)
                assert lane.draft_position in pairs, "one pair behind, or windows that are not"
        self.plans.append(plan)
        self._results.append(RoundResult(plan.round_id, lanes, reply.elapsed_ns))

    def receive(self, timeout_s: float) -> RoundResult | None:
        return self._results.popleft() if self._results else None

    def order(self, order: TierOrder) -> None:
        """A machine with tiers brings a channel of its own."""
        raise AssertionError(f"this engine has no tiers, yet moves {order}")

    def take_outcomes(self) -> tuple[TierOutcome, ...]:
        return ()

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


class DrawnPolicy(FixedPolicy):
    """The width that the machine last drew."""

    def __init__(self) -> None:
        super().__init__(1)


class Engine:
    """One prepared model: parts that any number of ranks share."""

    def __init__(self, checkpoint: Path, *, speculation=None, **fields) -> None:
        self.config = EngineConfig(
            checkpoint=str(checkpoint),
            device="cpu",
            dtype="float32",
            context_tokens=CONTEXT_TOKENS,
            prefill_tokens=96,
            page_pool_tokens=CONTEXT_TOKENS,
            concurrency=3,
            debug_checks=True,
            speculation={
                "families": "speculative",
                "draft_tokens": DRAFTS,
                "widths": tuple(range(1, DRAFTS + 2)),
                "policy": "fixed",
                **(speculation or {}),
            },
            **fields,
        )
        plan = make_plan(self.config)
        self.manifest: PreparedManifest = plan.manifest
        with torch.inference_mode():
            self._parts: ModelParts = _build(plan, self.config, SingleGroup())
        self._cold: dict[Work, Cold] = {}

    def rank(self, manifest: PreparedManifest) -> tuple[RankExecutor, Heard]:
        """A fresh rank whose memory is not a number, where it was never written."""
        heard = Heard()
        rank = RankExecutor(manifest, heard_parts(self._parts, heard))
        heard.store = rank.store
        with torch.inference_mode():
            for tensor in rank.store.groups.values():
                if tensor.dtype.is_floating_point:
                    tensor.fill_(float("nan"))
        return rank, heard

    def controller(
        self,
        rank: RankExecutor,
        depth: int,
        *,
        channel: Callable[[RankExecutor, int], DirectChannel] | None = None,
        cache: PrefixCacheConfig | None = None,
    ) -> tuple[Controller, DirectChannel]:
        """A controller over one rank, with another channel and other cache settings if given."""
        channel = (channel or DirectChannel)(rank, depth)
        changes = {"queue_depth": depth, "prefix_cache": cache or self.config.prefix_cache}
        config = self.config.model_copy(update=changes)
        vocabulary = [bytes([token % 256]) for token in range(self.manifest.vocab_size)]
        controller = Controller(
            rank.manifest,
            config,
            channel=channel,
            output=CollectingOutput(),
            token_bytes=vocabulary,
            recorder=Recorder("engine", "machine"),
        )
        controller._planner._policy = DrawnPolicy()
        return controller, channel

    def cold(self, work: Work) -> Cold:
        """The request alone, one token at a time, its prompt in as few chunks as possible."""
        if work not in self._cold:
            self._cold[work] = self._run_alone(work)
        return self._cold[work]

    def _run_alone(self, work: Work) -> Cold:
        rank, heard = self.rank(msgspec.structs.replace(self.manifest, snapshot_rows=0))
        controller, _ = self.controller(rank, 1)
        controller._planner._policy.width = DRAFTS + 1
        submit(controller, "cold", work)
        while controller.stats().pending_work:
            controller.step(0.0)
        controller.step(0.0)
        tokens = tokens_of(controller, "cold")
        drafts = {(key[1], key[2]): logits for key, logits in heard.drafter}
        history = (*work[0], *tokens)
        rows = {key[1]: logits for key, logits in heard.target if is_of(key[1], key[2], history)}
        return Cold(tokens, rows, drafts)


@dataclass(frozen=True)
class Cold:
    """tokens: the output; rows: target logits by position; drafts: by consumed tokens and the
    drafts before."""

    tokens: tuple[int, ...]
    rows: dict[int, torch.Tensor]
    drafts: dict[tuple[int, tuple[int, ...]], torch.Tensor]


def is_of(position: int, inputs: tuple[int, ...], history: tuple[int, ...]) -> bool:
    """Whether a round's inputs through the row at `position` are those of `history`."""
    end = position + 1
    return history[end - len(inputs) : end] == inputs


def submit(controller: Controller, name: str, work: Work, priority: int = 0) -> None:
    """Hand a request over; EOS ends none, so lengths are the test's own."""
    prompt, budget, sampling = work
    controller.submit(
        GenerationRequest(
            request_id=name,
            prompt_tokens=prompt,
            sampling=sampling,
            max_tokens=budget,
            ignore_eos=True,
            priority=priority,
        )
    )


def tokens_of(controller: Controller, name: str) -> tuple[int, ...]:
    """Visible tokens of a request."""
    items = controller._publisher._output.items(name)
    return tuple(t for item in items if isinstance(item, Delta) for t in item.tokens)


class EngineMachine(RuleBasedStateMachine):
    """Random use of one engine. A subclass names its `engine`."""

    engine: Engine
    pools = (7, 9, 14)
    rows = (0, 2, 12)

    @initialize(
        depth=st.sampled_from((1, 2)),
        pool=st.integers(0, 2),
        rows=st.integers(0, 2),
        seed=st.integers(0, 2**16),
    )
    def start(self, depth: int, pool: int, rows: int, seed: int) -> None:
        manifest = msgspec.structs.replace(
            self.engine.manifest,
            num_pages=self.pools[pool] + 1,
            snapshot_rows=self.rows[rows],
        )
        self.open(manifest, depth)
        self.works: dict[str, Work] = {}
        self.cancelled: set[str] = set()
        self.by_uid: dict[int, str] = {}
        self.compared = self.compared_drafts = 0
        self.heard.truth = lambda uid, consumed, depth: self._draft(seed, uid, consumed, depth)

    def open(self, manifest: PreparedManifest, depth: int) -> None:
        """Make `rank`, `heard`, `controller` and `channel`."""
        self.rank, self.heard = self.engine.rank(manifest)
        self.controller, self.channel = self.engine.controller(self.rank, depth)

    def _draft(self, seed: int, uid: int, consumed: int, depth: int) -> int:
        """The true token for a drawn number of depths, what the drafter says behind them."""
        if depth >= hash((seed, uid, consumed)) % (DRAFTS + 1) or uid not in self.by_uid:
            return -1
        work = self.works[self.by_uid[uid]]
        text = (*work[0], *self.engine.cold(work).tokens)
        place = consumed + 1 + depth
        return text[place] if place < len(text) else -1

    # What clients do.

    @rule(
        root=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        tail=st.integers(0, 2),
        budget=st.sampled_from((1, 3, 70, 140)),
        penalised=st.booleans(),
        priority=st.sampled_from((0, 0, 1, -1)),
    )
    def arrive(
        self, root: int, length: int, tail: int, budget: int, penalised: bool, priority: int
    ) -> None:
        """A prompt that begins like others, and may end differently."""
        span = self.engine.manifest.vocab_size - 8
        prompt = tuple(3 + (7 * i * i + 5 * i + 11 * root) % span for i in range(length))
        self.send(prompt + tuple(range(4 + tail, 4 + 2 * tail)), budget, penalised, priority)

    def send(
        self, prompt: tuple[int, ...], budget: int, penalised: bool = False, priority: int = 0
    ) -> None:
        """Submit a request that is compared with its run alone."""
        name = f"r{len(self.works)}"
        work = (prompt, budget, PENALISED if penalised else GREEDY)
        self.engine.cold(work)
        self.works[name] = work
        submit(self.controller, name, work, priority)
        self.controller._receive()
        self.by_uid[self.controller._requests[name].uid] = name

    @precondition(lambda self: self.works)
    @rule(which=st.integers(0, 63))
    def cancel(self, which: int) -> None:
        name = list(self.works)[which % len(self.works)]
        if name in self.controller._requests:
            self.cancelled.add(name)
        self.controller.cancel(name)

    @rule(width=st.integers(1, DRAFTS + 1))
    def change_width(self, width: int) -> None:
        self.controller._planner._policy.width = width

    @rule(steps=st.sampled_from((1, 1, 2, 5, 20, 60)))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.controller.step(0.0)

    # What page pressure does, at any moment.

    @precondition(lambda self: self.controller._admission.running)
    @rule(which=st.integers(0, 7))
    def preempt(self, which: int) -> None:
        running = list(self.controller._admission.running.values())
        self.controller._admission.preempt(running[which % len(running)])

    @rule()
    def evict(self) -> None:
        self.controller._snapshots.index.evict()

    @invariant()
    def nothing_is_damaged(self) -> None:
        if hasattr(self, "controller"):
            assert not self.controller.stats().fatal, self.controller.stats().fatal
            self.controller.check_integrity()

    # The comparison.

    def teardown(self) -> None:
        if not hasattr(self, "controller"):
            return
        for _ in range(100_000):
            if not self.controller.stats().pending_work:
                break
            self.controller.step(0.0)
        for _ in range(3):
            self.controller.step(0.0)
        stats = self.controller.stats()
        assert not stats.fatal, stats.fatal
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == stats.total_pages, "pages leaked"
        self.controller.check_integrity()
        self.rank.check_integrity()
        for name, work in self.works.items():
            self._compare_text(name, work)
        self._compare_logits()

    def _compare_text(self, name: str, work: Work) -> None:
        text, alone = tokens_of(self.controller, name), self.engine.cold(work).tokens
        items = self.controller._publisher._output.items(name)
        if isinstance(items[-1], Failed):
            assert name in self.cancelled and items[-1].code == "cancelled", items[-1]
        else:
            assert isinstance(items[-1], Finished)
            assert len(text) == work[1]
        assert text == alone[: len(text)], f"{name} differs from its run alone"

    def _compare_logits(self) -> None:
        heard = self.heard.take()
        for (uid, position, inputs), logits in heard.target:
            if uid not in self.by_uid:
                continue
            work = self.works[self.by_uid[uid]]
            cold = self.engine.cold(work)
            if is_of(position, inputs, (*work[0], *cold.tokens)) and position in cold.rows:
                error = largest_error(logits, cold.rows[position])
                assert error <= LOGITS_ATOL, f"{self.by_uid[uid]}: row {position} is off by {error}"
                self.compared += 1
        for (uid, consumed, drafts), logits in heard.drafter:
            if uid not in self.by_uid:
                continue
            cold = self.engine.cold(self.works[self.by_uid[uid]])
            if (theirs := cold.drafts.get((consumed, drafts))) is not None:
                error = largest_error(logits, theirs)
                assert error <= LOGITS_ATOL, f"{self.by_uid[uid]}: draft after {consumed}: {error}"
                self.compared_drafts += 1

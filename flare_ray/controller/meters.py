"""The controller's metrics, with handles resolved once per program (contract: A5)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flare_ray.contracts.cache import CacheStats, TierStats
from flare_ray.contracts.record import Status
from flare_ray.contracts.shapes import MAX_WIDTH, GraphShape
from flare_ray.contracts.tiers import Tier
from flare_ray.controller.admission import PREEMPTION_KINDS, Admission
from flare_ray.controller.cache import PrefixCache
from flare_ray.controller.cohort import SubmittedRound
from flare_ray.controller.live import LiveRequest
from flare_ray.controller.ports import RoundResult
from flare_ray.controller.verification import ProposalSource
from flare_ray.metrics import names
from flare_ray.metrics.recorder import Counter, Histogram, Recorder

_NS = 1e9
SAMPLE_NS = 250_000_000
"""Least time between two readings of what is counted elsewhere: engines report once a second."""
_ACTIVE = int(Status.ACTIVE)
"""A plain number: an operator of the enumeration costs a microsecond."""


@dataclass(frozen=True, slots=True)
class _ShapeMeters:
    """Instruments of one program."""

    rounds: Counter
    lane_rounds: Counter
    seconds: Histogram
    device_seconds: Histogram


class PrefixMeters:
    """What the prefix cache holds and did: its own counts, copied when gauges are."""

    def __init__(self, recorder: Recorder, admission: Admission, cache: PrefixCache) -> None:
        self._pool = admission.pool
        self._cache = cache
        self._pages = recorder.gauge(names.PAGES_CACHED)
        self._queries = recorder.counter(names.PREFIX_QUERIES)
        self._hits = recorder.counter(names.PREFIX_HITS)
        self._corrupt = recorder.counter(names.SNAPSHOT_CORRUPT)
        self._stopped = recorder.gauge(names.DISK_TIER_STOPPED)
        self._tiers = {str(tier): _TierMeters(recorder, str(tier)) for tier in Tier}
        self._seen: CacheStats | None = None

    def sample(self) -> None:
        """Copy counts and sizes; most rounds change none of them."""
        self._pages.set(self._pool.cached_pages)
        for source, seconds in self._cache.take_restore_times():
            self._tiers[str(source)].restore_seconds.observe(seconds)
        stats = self._cache.stats()
        if stats == self._seen:
            return
        self._seen = stats
        _raise_to(self._queries, stats.queried_tokens)
        _raise_to(self._hits, stats.hit_tokens)
        _raise_to(self._corrupt, sum(tier.corrupt_files for tier in stats.tiers))
        self._stopped.set(1.0 if any(tier.stopped for tier in stats.tiers) else 0.0)
        for tier in stats.tiers:
            self._tiers[tier.tier].sample(tier)


class _TierMeters:
    """Instruments of one tier."""

    def __init__(self, recorder: Recorder, tier: str) -> None:
        self._held = recorder.gauge(names.SNAPSHOTS_HELD, tier)
        self._bytes = recorder.gauge(names.SNAPSHOT_BYTES, tier)
        self._saved = recorder.counter(names.SNAPSHOT_SAVED, tier)
        self._saved_bytes = recorder.counter(names.SNAPSHOT_SAVED_BYTES, tier)
        self._restored = recorder.counter(names.SNAPSHOT_RESTORED, tier)
        self._restored_bytes = recorder.counter(names.SNAPSHOT_RESTORED_BYTES, tier)
        self._evicted = recorder.counter(names.SNAPSHOT_EVICTED, tier)
        self._evicted_bytes = recorder.counter(names.SNAPSHOT_EVICTED_BYTES, tier)
        self.restore_seconds = recorder.histogram(names.SNAPSHOT_RESTORE_SECONDS, tier)

    def sample(self, stats: TierStats) -> None:
        """Copy what a tier holds and did."""
        self._held.set(stats.snapshots)
        self._bytes.set(stats.used_bytes)
        _raise_to(self._saved, stats.saved_tokens)
        _raise_to(self._saved_bytes, stats.saved_bytes)
        _raise_to(self._restored, stats.restored_tokens)
        _raise_to(self._restored_bytes, stats.restored_bytes)
        _raise_to(self._evicted, stats.evicted_tokens)
        _raise_to(self._evicted_bytes, stats.evicted_bytes)


def _raise_to(counter: Counter, total: int) -> None:
    counter.add(total - counter.value)


def _at_least(rounds: Sequence[int]) -> list[int]:
    """Lane rounds that accepted draft 0, 1, .., through the deepest that any did; from those by
    number of accepted drafts."""
    passed = list(accumulate(reversed(rounds[1:])))[::-1]
    return [count for count in passed if count]


class Meters:
    """Records what rounds and requests did. Used by the controller's thread only."""

    def __init__(self, recorder: Recorder, admission: Admission, cache: PrefixCache) -> None:
        self._recorder = recorder
        self._admission = admission
        self._shapes: dict[GraphShape, _ShapeMeters] = {}
        self._chosen: dict[tuple[int, str], Counter] = {}
        self._running = recorder.gauge(names.REQUESTS_RUNNING)
        self._waiting = recorder.gauge(names.REQUESTS_WAITING)
        self._preempted = recorder.gauge(names.REQUESTS_PREEMPTED)
        self._preemptions = {
            kind: recorder.counter(names.PREEMPTIONS, kind) for kind in PREEMPTION_KINDS
        }
        self._recomputed = recorder.counter(names.RECOMPUTED_TOKENS)
        self._pages_free = recorder.gauge(names.PAGES_FREE)
        self._page_usage = recorder.gauge(names.CACHE_USAGE)
        recorder.gauge(names.PAGES_TOTAL).set(admission.pool.total_pages)
        recorder.gauge(names.ENGINE_START).set(time.time())
        self._fatal = recorder.gauge(names.ENGINE_FATAL)
        self._queue_time = recorder.histogram(names.QUEUE_TIME)
        self._prompt_length = recorder.histogram(names.REQUEST_PROMPT_TOKENS)
        self._prompt_tokens = recorder.counter(names.PROMPT_TOKENS)
        self._drafts = recorder.counter(names.SPEC_DRAFTS)
        self._draft_tokens = recorder.counter(names.SPEC_DRAFT_TOKENS)
        self._accepted = recorder.counter(names.SPEC_ACCEPTED_TOKENS)
        self._cut = recorder.counter(names.SPEC_CUT_TOKENS)
        self._forced = recorder.counter(names.SPEC_FORCED_TOKENS)
        self._copied: dict[tuple[int, int], tuple[Counter, Counter]] = {}
        self._accepted_at: list[Counter] = []
        # Lane rounds by number of accepted drafts.
        self._accepted_drafts = [0] * MAX_WIDTH
        self._emitted = recorder.counter(names.SPEC_EMITTED)
        self._dead_lanes = recorder.counter(names.SPEC_DEAD_LANES)
        self._plan_seconds = recorder.histogram(names.CONTROLLER_PLAN_SECONDS)
        self._cpu = recorder.counter(names.CONTROLLER_CPU)
        self._deferred = recorder.counter(names.PREFILL_DEFERRED)
        self._expected_emitted = recorder.counter(names.POLICY_PREDICTED_EMITTED)
        self._expected_seconds = recorder.counter(names.POLICY_PREDICTED_SECONDS)
        self._measured_emitted = recorder.counter(names.POLICY_MEASURED_EMITTED)
        self._measured_seconds = recorder.counter(names.POLICY_MEASURED_SECONDS)
        self._probe_loss = recorder.counter(names.POLICY_PROBE_LOSS)
        self._regret = recorder.counter(names.POLICY_REGRET)
        self._account = recorder.gauge(names.POLICY_PROBE_ACCOUNT)
        self._cpu_seen: float | None = None
        self._sample_due_ns = 0
        self._prefix = PrefixMeters(recorder, admission, cache)

    def admitted(self, live: LiveRequest, now_ns: int) -> None:
        """A request got its slot; only its first one is counted."""
        if live.preemptions:
            return
        self._queue_time.observe((now_ns - live.arrival_ns) / _NS)
        self._prompt_length.observe(len(live.request.prompt_tokens))

    def submitted(self, planned: SubmittedRound, now_ns: int) -> None:
        """A plan is on its way."""
        self._plan_seconds.observe((now_ns - planned.started_ns) / _NS)
        decision = planned.decision
        if decision is None:
            return
        key = (decision.shape.verify_width, decision.reason)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._recorder.counter(names.POLICY_CHOSEN, str(key[0]), key[1])
            self._chosen[key] = chosen
        chosen.add()
        if planned.deferred:
            self._deferred.add()
        self._expected_emitted.add(decision.expected_emitted)
        self._expected_seconds.add(decision.expected_ns / _NS)
        self._probe_loss.add(decision.probe_ns / _NS)
        self._regret.add(decision.regret_ns / _NS)
        self._account.set(decision.account_ns / _NS)

    def harvested(self, planned: SubmittedRound, result: RoundResult, cost_ns: int) -> None:
        """A round was answered; `cost_ns` is what it cost, host gap included."""
        meters = self._of_shape(planned.plan.shape)
        meters.rounds.add()
        meters.seconds.observe(cost_ns / _NS)
        meters.device_seconds.observe(result.elapsed_ns / _NS)
        if planned.plan.prefill:
            self._count_chunks(planned)
            return
        emitted = self._count_lanes(meters, result)
        if planned.decision is not None and planned.decision.expected_ns:
            self._measured_emitted.add(emitted)
            self._measured_seconds.add(cost_ns / _NS)

    def grammar_drafts(self, cut: int, forced: int) -> None:
        """Drafts that grammars have cut and put in their places, since the start."""
        _raise_to(self._cut, cut)
        _raise_to(self._forced, forced)

    def copies(self, source: int, offered: int, accepted: Sequence[bool]) -> None:
        """Copied drafts of one lane and round.

        Args:
            source: their `ProposalSource`.
            accepted: by depth; depths beyond it were not.
        """
        for depth in range(offered):
            told, passed = self._copied.get((source, depth)) or self._copied_at(source, depth)
            told.add()
            if depth < len(accepted):
                passed.add(accepted[depth])

    def _copied_at(self, source: int, depth: int) -> tuple[Counter, Counter]:
        labels = ProposalSource(source).name.lower(), str(depth)
        found = self._copied[source, depth] = (
            self._recorder.counter(names.SPEC_COPIED_TOKENS, *labels),
            self._recorder.counter(names.SPEC_COPIED_ACCEPTED_TOKENS, *labels),
        )
        return found

    def sample_if_due(self, now_ns: int) -> None:
        """As `sample`, at most every SAMPLE_NS; cheap in between."""
        if now_ns >= self._sample_due_ns:
            self._sample_due_ns = now_ns + SAMPLE_NS
            self.sample()

    def sample(self) -> None:
        """Gauges, totals that others count, and the CPU time of this thread since the last call."""
        for depth, passed in enumerate(_at_least(self._accepted_drafts)):
            _raise_to(self._at_depth(depth), passed)
        pool = self._admission.pool
        free = pool.free_pages
        self._running.set(len(self._admission.running))
        waiting = self._admission.waiting
        self._waiting.set(len(waiting))
        self._preempted.set(sum(live.preemptions > 0 for live in waiting))
        for kind, counter in self._preemptions.items():
            _raise_to(counter, self._admission.preempted[kind])
        self._pages_free.set(free)
        self._prefix.sample()
        self._page_usage.set(1.0 - free / pool.total_pages)
        now = time.thread_time()
        if self._cpu_seen is not None:
            self._cpu.add(now - self._cpu_seen)
        self._cpu_seen = now

    def fatal(self) -> None:
        """The engine has failed for good."""
        self._fatal.set(1)

    def _count_chunks(self, planned: SubmittedRound) -> None:
        for live, lane in zip(planned.lanes, planned.plan.prefill, strict=True):
            again = min(len(lane.tokens), max(live.computed_tokens - lane.start, 0))
            self._recomputed.add(again)
            self._prompt_tokens.add(len(lane.tokens) - again)

    def _count_lanes(self, meters: _ShapeMeters, result: RoundResult) -> int:
        """Add a round's living lanes to the totals; the tokens that they emitted."""
        active = emitted = drafting = offered = accepted = 0
        for lane in result.lanes:
            if not lane.status & _ACTIVE:
                continue
            active += 1
            emitted += lane.emitted
            if lane.offered:
                drafting += 1
                offered += lane.offered
                accepted += lane.accepted
                self._accepted_drafts[lane.accepted] += 1
        self._dead_lanes.add(len(result.lanes) - active)
        meters.lane_rounds.add(active)
        self._emitted.add(emitted)
        self._drafts.add(drafting)
        self._draft_tokens.add(offered)
        self._accepted.add(accepted)
        return emitted

    def _at_depth(self, depth: int) -> Counter:
        while depth >= len(self._accepted_at):
            label = str(len(self._accepted_at))
            counter = self._recorder.counter(names.SPEC_ACCEPTED_PER_POSITION, label)
            self._accepted_at.append(counter)
        return self._accepted_at[depth]

    def _of_shape(self, shape: GraphShape) -> _ShapeMeters:
        meters = self._shapes.get(shape)
        if meters is None:
            kind, width = str(shape.kind), str(shape.verify_width)
            meters = _ShapeMeters(
                rounds=self._recorder.counter(names.ROUNDS, kind, str(shape.batch_capacity), width),
                lane_rounds=self._recorder.counter(names.SPEC_LANE_ROUNDS, width),
                seconds=self._recorder.histogram(names.ROUND_SECONDS, kind),
                device_seconds=self._recorder.histogram(names.ROUND_DEVICE_SECONDS, kind),
            )
            self._shapes[shape] = meters
        return meters

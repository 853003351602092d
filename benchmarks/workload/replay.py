"""The service against a minimal replay of the graph sequence that it ran (contract: B5, C7).

A recording engine answers requests through `submit()`; after each batch of requests a second rank,
prepared alike, executes the same plans one after the other with nothing in between: no controller,
no queue, no delivery. Both take turns on the same machine, so its speed cancels out. Records must
be equal, otherwise the replay did other work.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.workload.arms import ENGINE, engine_settings
from flare_ray.contracts.messages import Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.ports import RoundResult
from flare_ray.controller.sampling import resolve

if TYPE_CHECKING:
    from flare_ray.actors.core import EngineCore
    from flare_ray.actors.thread_channel import ThreadChannel
    from flare_ray.config import EngineConfig
    from flare_ray.contracts.plan import RoundPlan

LIMIT_S = 300.0
FIRST_RUNS = 2


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What both do.

    Attributes:
        prompts: token ids; each is one request of `max_tokens` tokens.
        lanes: requests at once.
        arm: whose speculation settings apply.
    """

    prompts: Sequence[tuple[int, ...]]
    lanes: int
    max_tokens: int
    arm: str
    checkpoint: Path
    engine: dict[str, Any] = field(default_factory=lambda: ENGINE)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Time of both over the counted batches.

    Attributes:
        device_s: program time that rank 0 reported within the service's.
        gap_us: median time between an answer that leaves the ranks idle and the next plan, inside a
            batch; 0 where a round was always queued.
        by_graph: executions and mean milliseconds of program time, by the graph that ran.
    """

    service_s: float
    replay_s: float
    service_cpu_s: float
    replay_cpu_s: float
    device_s: float
    rounds: int
    tokens: int
    gap_us: float
    by_graph: Mapping[str, tuple[int, float]]

    @property
    def ratio(self) -> float:
        """Service over replay, by the wall."""
        return self.service_s / self.replay_s

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU time of the process."""
        return self.service_cpu_s / self.replay_cpu_s


class _Recording:
    """A channel that keeps what passes; everything else is the channel's own.

    Attributes:
        gaps_s: from the answer that left the ranks without work to the next plan.
    """

    def __init__(self, channel: ThreadChannel) -> None:
        self._channel = channel
        self.plans: list[RoundPlan] = []
        self.results: list[RoundResult] = []
        self.gaps_s: list[float] = []
        self._idle_since_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def submit(self, plan: RoundPlan) -> None:
        if self._idle_since_s:
            self.gaps_s.append(time.perf_counter() - self._idle_since_s)
            self._idle_since_s = 0.0
        self._channel.submit(plan)
        self.plans.append(plan)

    def receive(self, timeout_s: float) -> Any:
        result = self._channel.receive(timeout_s)
        if isinstance(result, RoundResult):
            self.results.append(result)
            idle = len(self.results) == len(self.plans)
            self._idle_since_s = time.perf_counter() if idle else 0.0
        return result


def measure_replay(job: ReplayJob) -> Replayed:
    """Run both; call it in a process of its own.

    Raises:
        BenchmarkFailure: a request failed, or the replay's records differ.
    """
    import torch

    from flare_ray.actors.openmp import wait_passively
    from flare_ray.config import EngineConfig

    wait_passively()
    torch.set_num_threads(job.engine["threads_per_rank"])
    settings = engine_settings(job.arm, job.checkpoint, job.engine)
    config = EngineConfig.model_validate({**settings, "grammar": {"enabled": False}})
    core, recording = _recorded_engine(config)
    try:
        with torch.inference_mode():
            replay = _Replay(config)
            return _in_turn(job, core, recording, replay)
    finally:
        core.shutdown(0.0)


def _recorded_engine(config: EngineConfig) -> tuple[EngineCore, _Recording]:
    from flare_ray.actors.core import EngineCore, EngineParts
    from flare_ray.actors.inprocess import HEALTH_TIMEOUT_S, prepare_threads
    from flare_ray.actors.thread_channel import ThreadChannel
    from flare_ray.actors.vocabulary import engine_token_bytes

    threads = prepare_threads(config)
    manifest = threads.executors[0].manifest
    recording = _Recording(ThreadChannel(threads, config.rank_timeout_s))
    core = EngineCore(
        EngineParts(
            manifest=manifest,
            config=config,
            channel=recording,
            token_bytes=engine_token_bytes(config, manifest),
            release_ranks=threads.stop,
            health_timeout_s=HEALTH_TIMEOUT_S,
        )
    )
    core.start()
    return core, recording


class _Replay:
    """A rank of this thread that executes recorded plans."""

    def __init__(self, config: EngineConfig) -> None:
        from flare_ray.actors.masks import MaskReader
        from flare_ray.device.parallel.groups import SingleGroup
        from flare_ray.device.prepare import prepare_rank

        self._executor = prepare_rank(config, SingleGroup())
        self._masks = MaskReader(self._executor.manifest.vocab_size)
        self._done = 0

    def catch_up(self, recording: _Recording) -> tuple[float, float]:
        """Wall and CPU seconds of every plan that was answered and not replayed yet.

        Raises:
            BenchmarkFailure: a record differs.
        """
        from flare_ray.actors.rank_loop import run_plan
        from flare_ray.contracts.record import unpack_rows

        results = recording.results[self._done :]
        plans = recording.plans[self._done : self._done + len(results)]
        replies = []
        started_s, cpu_s = time.perf_counter(), time.process_time()
        for plan in plans:
            replies.append(run_plan(self._executor, plan, self._masks, _no_barrier))
        wall_s, spent_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        self._done += len(results)
        for result, reply in zip(results, replies, strict=True):
            if unpack_rows(reply.rows, reply.scores, reply.prompt_scores) != result.lanes:
                raise BenchmarkFailure(f"round {result.round_id} was replayed to another record")
        return wall_s, spent_s


def _no_barrier(round_id: int, drafts: tuple[tuple[int, ...], ...]) -> Any:
    raise BenchmarkFailure(f"round {round_id} has a barrier; constrained rounds are not replayed")


def _in_turn(job: ReplayJob, core: EngineCore, recording: _Recording, replay: _Replay) -> Replayed:
    """Batches of requests, each replayed right behind; the first one warms both up."""
    totals = [0.0] * 5
    rounds = tokens = 0
    gaps_s: list[float] = []
    batches = [job.prompts[i : i + job.lanes] for i in range(0, len(job.prompts), job.lanes)]
    for number, batch in enumerate(batches):
        before, gaps_before = len(recording.results), len(recording.gaps_s)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        ends = _answer(core, job, batch, number)
        service = (time.perf_counter() - started_s, time.process_time() - cpu_s)
        replayed = replay.catch_up(recording)
        if number:
            grown = recording.results[before:]
            device_s = sum(result.elapsed_ns for result in grown) / 1e9
            for place, value in enumerate((*service, *replayed, device_s)):
                totals[place] += value
            rounds += len(grown)
            # The first one lies between batches.
            gaps_s += recording.gaps_s[gaps_before + 1 :]
            tokens += sum(end.completion_tokens for end in ends)
    return Replayed(
        service_s=totals[0],
        service_cpu_s=totals[1],
        replay_s=totals[2],
        replay_cpu_s=totals[3],
        device_s=totals[4],
        rounds=rounds,
        tokens=tokens,
        gap_us=statistics.median(gaps_s) * 1e6 if gaps_s else 0.0,
        by_graph=_by_graph(recording),
    )


def _by_graph(recording: _Recording) -> dict[str, tuple[int, float]]:
    """Cost of every graph; its first two executions, which record it on a CPU, are left out."""
    costs: dict[str, list[float]] = defaultdict(list)
    for plan, result in zip(recording.plans, recording.results, strict=False):
        shape = plan.shape
        name = f"{shape.kind.value} B={shape.batch_capacity} rows={shape.token_capacity}"
        costs[name].append(result.elapsed_ns / 1e6)
    return {
        name: (len(spent) - FIRST_RUNS, round(statistics.mean(spent[FIRST_RUNS:]), 3))
        for name, spent in sorted(costs.items())
        if len(spent) > FIRST_RUNS
    }


def _answer(
    core: EngineCore, job: ReplayJob, batch: Sequence[tuple[int, ...]], number: int
) -> list[Finished]:
    """Submit a batch at once and wait for all of it."""
    ends: list[Finished | Failed] = []
    over = threading.Semaphore(0)

    def note(item: StreamItem) -> None:
        if isinstance(item, Finished | Failed):
            ends.append(item)
            over.release()

    for place, ids in enumerate(batch):
        core.submit(_request(core, ids, f"{number}-{place}", job), note)
    for _ in batch:
        if not over.acquire(timeout=LIMIT_S):
            raise BenchmarkFailure(f"no request ended within {LIMIT_S:g} s")
    failed = [end for end in ends if isinstance(end, Failed)]
    if failed:
        raise BenchmarkFailure(f"a request failed: {failed[0].message}")
    return [end for end in ends if isinstance(end, Finished)]


def _request(
    core: EngineCore, ids: tuple[int, ...], name: str, job: ReplayJob
) -> GenerationRequest:
    manifest = core.manifest
    resolved = resolve(
        SamplingParams(seed=len(ids), max_tokens=job.max_tokens, ignore_eos=True),
        manifest.sampling_defaults,
        vocab_size=manifest.vocab_size,
        prompt_tokens=len(ids),
        context_tokens=manifest.context_tokens,
    )
    return GenerationRequest(
        request_id=name,
        prompt_tokens=ids,
        sampling=resolved.sampling,
        max_tokens=resolved.max_tokens,
        ignore_eos=True,
    )

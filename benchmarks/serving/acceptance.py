"""Mean emitted tokens a round at one fixed depth, by category, from the engine's own records.

Rounds only: the first token of an answer comes from its prompt. A round that ends an answer counts
with what it emitted, so short answers cap the mean. Acceptance does not depend on time, so this arm
runs without HTTP and Ray, several requests at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import Prompt
from flare_ray.contracts.messages import Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.sampling import resolve
from flare_ray.metrics import names
from flare_ray.metrics.recorder import Snapshot

if TYPE_CHECKING:
    from flare_ray.actors.core import EngineCore

REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class AcceptanceJob:
    """What to run.

    Attributes:
        engine: engine section of the deployment.
        checkpoint: absolute, replaces the section's.
        depth: drafts of every round.
        temperature: None = the checkpoint's sampling defaults; 0 = greedy.
        top_p: likewise; 1 = off.
        reproducible: draw by position (contract: S8).
    """

    engine: dict[str, Any]
    checkpoint: Path
    prompts: dict[str, list[Prompt]]
    depth: int
    max_tokens: int
    temperature: float | None
    top_p: float | None = None
    reproducible: bool = False


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of one category.

    Attributes:
        rounds: lanes of rounds that executed.
        emitted: tokens those committed.
        offered / accepted: drafts.
        survived: rounds that accepted at least 1, 2, ... drafts.
    """

    rounds: int
    emitted: int
    offered: int
    accepted: int
    survived: tuple[int, ...]

    @property
    def mean_emitted(self) -> float:
        """Tokens a round."""
        return self.emitted / self.rounds

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            self.emitted + other.emitted,
            self.offered + other.offered,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(self.survived, other.survived, strict=True)),
        )


def measure_acceptance(job: AcceptanceJob) -> dict[str, Acceptance]:
    """Run every category at the fixed depth; call it in a process of its own.

    Raises:
        BenchmarkFailure: a request failed, or records and answers disagree.
    """
    from flare_ray.actors.inprocess import start_inprocess
    from flare_ray.config import EngineConfig

    speculation = {"draft_tokens": job.depth, "policy": "fixed", "fixed_width": job.depth + 1}
    settings = {**job.engine, "checkpoint": str(job.checkpoint), "speculation": speculation}
    core = start_inprocess(EngineConfig.model_validate(settings))
    try:
        return {
            category: _run_category(core, prompts, job) for category, prompts in job.prompts.items()
        }
    finally:
        core.shutdown(0.0)


def _run_category(core: EngineCore, prompts: Sequence[Prompt], job: AcceptanceJob) -> Acceptance:
    before = core.snapshot()
    ends = run_requests(core, prompts, job)
    after = core.snapshot()
    grown = _growth(before, after)
    found = Acceptance(
        rounds=sum(grown[names.SPEC_LANE_ROUNDS.name].values()),
        emitted=sum(grown[names.SPEC_EMITTED.name].values()),
        offered=sum(grown[names.SPEC_DRAFT_TOKENS.name].values()),
        accepted=sum(grown[names.SPEC_ACCEPTED_TOKENS.name].values()),
        survived=tuple(
            grown[names.SPEC_ACCEPTED_PER_POSITION.name].get((str(i),), 0) for i in range(job.depth)
        ),
    )
    # Every answer is one token from its prompt plus what its rounds emitted.
    expected = sum(end.completion_tokens - 1 for end in ends)
    if found.emitted != expected:
        raise BenchmarkFailure(
            f"the records of {prompts[0].category} hold {found.emitted} tokens of rounds, the "
            f"answers {expected}"
        )
    return found


def run_requests(core: EngineCore, prompts: Sequence[Prompt], job: AcceptanceJob) -> list[Finished]:
    """All prompts, as many at once as the engine has slots."""
    room = threading.Semaphore(core.manifest.slots)
    ends: list[Finished | Failed] = []

    def note(item: StreamItem) -> None:
        if isinstance(item, Finished | Failed):
            ends.append(item)
            room.release()

    for prompt in prompts:
        _wait(room)
        core.submit(_request(core, prompt, job), note)
    for _ in range(core.manifest.slots):  # all places free again: everything has ended
        _wait(room)
    failed = [end.message for end in ends if isinstance(end, Failed)]
    if failed:
        raise BenchmarkFailure(f"a request of {prompts[0].category} failed: {failed[0]}")
    return [end for end in ends if isinstance(end, Finished)]


def _wait(room: threading.Semaphore) -> None:
    if not room.acquire(timeout=REQUEST_LIMIT_S):
        raise BenchmarkFailure(f"no request ended within {REQUEST_LIMIT_S:.0f} s")


def _request(core: EngineCore, prompt: Prompt, job: AcceptanceJob) -> GenerationRequest:
    manifest = core.manifest
    params = SamplingParams(
        temperature=job.temperature,
        top_p=job.top_p,
        seed=prompt.seed,
        max_tokens=job.max_tokens,
        reproducible=job.reproducible,
    )
    resolved = resolve(
        params,
        manifest.sampling_defaults,
        vocab_size=manifest.vocab_size,
        prompt_tokens=len(prompt.ids),
        context_tokens=manifest.context_tokens,
    )
    return GenerationRequest(
        request_id=f"{prompt.category}-{prompt.place}",
        prompt_tokens=prompt.ids,
        sampling=resolved.sampling,
        max_tokens=resolved.max_tokens,
    )


def _growth(before: Snapshot, after: Snapshot) -> dict[str, dict[tuple[str, ...], int]]:
    """Growth of the counters between two snapshots, by series and labels."""
    old = {(sample.name, sample.labels): sample.value for sample in before.samples}
    grown: dict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
    for sample in after.samples:
        difference = sample.value - old.get((sample.name, sample.labels), 0)
        grown[sample.name][sample.labels] = round(difference)
    return grown

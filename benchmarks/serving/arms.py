"""The service arms of ``first_light``: what is run against a started service, and what is kept."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.serving.client import Observation, Pass, open_client, run_pass, stream
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.memory import MemorySample, MemorySampler
from benchmarks.serving.service import REPORT_PAUSE_S, Service, Target, serving
from benchmarks.serving.workload import TEXT_PATH, Prompt
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition

LANES = (1, 4)
MEMORY_PERIOD_S = 5.0
TTFT_PROMPT_TOKENS = 64
TTFT_OUTPUT_TOKENS = 4
_PREFILL = {"kind": "prefill"}


@dataclass(frozen=True, slots=True)
class Workload:
    """What every service arm runs.

    Attributes:
        measured: the mixed set.
        warm: other prompts, run before anything is measured.
        idle: prompts of `TTFT_PROMPT_TOKENS` tokens.
    """

    measured: tuple[Prompt, ...]
    warm: tuple[Prompt, ...]
    idle: tuple[Prompt, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Time to the first token of one request on an idle service, and its prefill pass.

    Attributes:
        first_s: as the client sees it.
        prefill_s: the program's time in rank 0.
    """

    first_s: float
    prefill_s: float


@dataclass(slots=True)
class ServiceArm:
    """One way to start the service, and everything measured on it.

    Attributes:
        passes: by lanes, in order.
        rounds: growth of the service's counters over each pass, in the same order.
        steady: growth while every lane was busy, passes of several lanes only.
        peaks: largest memory reading of each start.
    """

    name: str
    options: tuple[str, ...]
    startups_s: list[float] = field(default_factory=list)
    passes: dict[int, list[Pass]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[int, list[Exposition]] = field(default_factory=lambda: defaultdict(list))
    steady: list[Exposition] = field(default_factory=list)
    peaks: list[MemorySample] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)

    def tokens_per_s(self, lanes: int) -> float:
        """Completion tokens a second over all passes with that many lanes."""
        done = self.passes[lanes]
        return sum(one.tokens for one in done) / sum(one.wall_s for one in done)

    @property
    def peak(self) -> MemorySample:
        """The largest reading of all starts."""
        return max(self.peaks, key=lambda sample: sample.total.pss_bytes)


def visit(
    arm: ServiceArm,
    target: Target,
    work: Workload,
    *,
    repeats: int,
    say: Callable[[str], None],
    first_tokens: bool = False,
) -> None:
    """Start the service of an arm, run the mixed set `repeats` times at every lane count, stop it.

    Args:
        arm: extended in place.
        first_tokens: also measure time to first token, on the idle service.
    """
    with serving(target, arm.options) as service:
        arm.startups_s.append(service.startup_s)
        say(f"{arm.name}: ready after {service.startup_s:.1f} s")
        with MemorySampler(service.pid, period_s=MEMORY_PERIOD_S) as memory:
            for lanes in LANES:
                _run(service, work.warm, work, lanes)
            for _ in range(repeats):
                for lanes in LANES:
                    measured = _measure(arm, service, work, lanes)
                    rate = measured.tokens / measured.wall_s
                    say(f"{arm.name}, {lanes} lane(s): {measured.tokens} tokens, {rate:.1f}/s")
            if first_tokens:
                arm.first_tokens += [_first_token(service, prompt) for prompt in work.idle]
                shown = median(one.first_s for one in arm.first_tokens) * 1e3
                say(f"{arm.name}: first token after {shown:.0f} ms (p50, idle)")
        arm.peaks.append(memory.peak)


def _measure(arm: ServiceArm, service: Service, work: Workload, lanes: int) -> Pass:
    before = service.settled_metrics()
    window = _SteadyWindow(service) if lanes > 1 else None
    measured = _run(service, work.measured, work, lanes, window)
    arm.passes[lanes].append(measured)
    arm.rounds[lanes].append(service.settled_metrics().since(before))
    if window is not None:
        arm.steady.append(window.growth())
    return measured


class _SteadyWindow:
    """Counters at two moments between which every lane was busy.

    A reading shows the engine up to a second ago, so the first is taken only after a report from
    inside the pass must have replaced it; the last one is taken when the first lane runs dry.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._first: Exposition | None = None
        self._last: Exposition | None = None
        self._timer = threading.Timer(REPORT_PAUSE_S, self._read_first)
        self._timer.daemon = True

    def start(self) -> None:
        """Every lane is about to be busy."""
        self._timer.start()

    def drained(self) -> None:
        """A lane has run dry."""
        self._timer.cancel()
        self._last = self._service.metrics()

    def growth(self) -> Exposition:
        """Between the two readings.

        Raises:
            BenchmarkFailure: the pass was too short for two.
        """
        if self._first is None or self._last is None:
            raise BenchmarkFailure(
                f"a pass ended within {REPORT_PAUSE_S} s, too short to read the controller's time: "
                "use more prompts"
            )
        return self._last.since(self._first)

    def _read_first(self) -> None:
        self._first = self._service.metrics()


def _run(
    service: Service,
    prompts: Sequence[Prompt],
    work: Workload,
    lanes: int,
    window: _SteadyWindow | None = None,
) -> Pass:
    def body(prompt: Prompt) -> dict[str, Any]:
        return prompt.body(service.target.model, work.max_tokens)

    if window is not None:
        window.start()
    drained = window.drained if window is not None else None
    return run_pass(service.base_url, prompts, lanes=lanes, body_of=body, on_drained=drained)


def _first_token(service: Service, prompt: Prompt) -> FirstTokens:
    """One short request on an idle service.

    Raises:
        BenchmarkFailure: the service ran another number of prefill passes than one.
    """
    body = {
        "model": service.target.model,
        "prompt": list(prompt.ids),
        "max_tokens": TTFT_OUTPUT_TOKENS,
        "ignore_eos": True,
        "seed": prompt.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    before = service.metrics()
    with open_client(service.base_url) as client:
        client.get("/health/live")  # the connection is open, as a client's usually is
        seen: Observation = stream(client, prompt, path=TEXT_PATH, body=body)
    grown = service.settled_metrics().since(before)
    passes = grown.observations(names.ROUND_DEVICE_SECONDS, _PREFILL)
    if passes != 1:
        raise BenchmarkFailure(f"{passes:.0f} prefill passes for one prompt: is someone else here?")
    return FirstTokens(seen.first_s, grown.seconds(names.ROUND_DEVICE_SECONDS, _PREFILL))

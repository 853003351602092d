"""``python -m benchmarks.serving.soak --minutes 15``: mixed load; memory; no lost request.

Streams, whole answers, stop strings, clients that leave, wrong requests and long prompts, 1 to 8
at a time. Memory of the whole tree is read every five seconds; after a warm-up, the lowest reading
of each half minute must not rise by more than a mebibyte a minute. At the end nothing may run,
every page must be free, and the engine's own counters must balance.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.memory import NOTHING, MemorySample, MemorySampler, slope_per_s
from benchmarks.serving.service import Service, leave_on_terminate, open_target, serving
from benchmarks.serving.soak_load import Ledger, Traffic
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts
from benchmarks.support.results import Bound, conclude
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition

RESULT = "soak"
OFFICIAL_MINUTES = 15.0
SAMPLE_PERIOD_S = 5.0
WARM_UP_S = 180.0
WARM_UP_RATIO = 0.25
WINDOW_S = 30.0
IDLE_LIMIT_S = 30.0
MIB = 2**20
# Refusals of the engine itself: never admitted, so no part of its balance.
REFUSAL_CODES = ("overloaded", "invalid_request_error", "context_length_exceeded")
BOUNDS = (
    Bound(metric="memory_slope_mib_per_min", operator="<=", value=1.0),
    Bound(metric="allocated_slope_mib_per_min", operator="<=", value=1.0),
    Bound(metric="lost_requests", operator="==", value=0),
    Bound(metric="unexpected_answers", operator="==", value=0),
    Bound(metric="pages_held_at_end", operator="==", value=0),
    Bound(metric="requests_left_at_end", operator="==", value=0),
    Bound(metric="engine_balance", operator="==", value=0),
)


@dataclass(frozen=True, slots=True)
class Soak:
    """Everything one run recorded.

    Attributes:
        grown: growth of the service's counters over the run.
        last: the final reading, once idle or out of patience.
    """

    minutes: float
    ledger: Ledger
    samples: tuple[MemorySample, ...]
    grown: Exposition
    last: Exposition


def soak_metrics(run: Soak) -> dict[str, JsonValue]:
    """The result file's metrics: targets first."""
    ledger, kept = run.ledger, after_warm_up(run.samples)
    return {
        "memory_slope_mib_per_min": slope_mib_per_min(kept, pss_of_tree),
        "allocated_slope_mib_per_min": slope_mib_per_min(kept, allocated_of_tree),
        "lost_requests": ledger.total("lost") + ledger.unaccounted,
        "unexpected_answers": ledger.unexpected,
        "pages_held_at_end": held_pages(run.last),
        "requests_left_at_end": live_requests(run.last),
        "engine_balance": engine_balance(run.grown),
        "minutes": run.minutes,
        "requests": ledger.sent,
        "finished": ledger.total("finished"),
        "refused": ledger.total("refused"),
        "cancelled": ledger.total("cancelled"),
        "peak_memory_mib": max(map(pss_of_tree, run.samples)) / MIB,
        "engine": {
            "admitted": run.grown.value(names.REQUESTS_ADMITTED),
            "success": dict(run.grown.by_label(names.REQUESTS_FINISHED, "finished_reason")),
            "failures": dict(run.grown.by_label(names.REQUESTS_FAILED, "code")),
            "generation_tokens": run.grown.value(names.GENERATION_TOKENS),
            "rounds": run.grown.value(names.ROUNDS),
        },
        "allocated_slope_by_process_mib_per_min": {
            name: round(slope_mib_per_min(kept, allocated_of(name)), 3) for name in processes(kept)
        },
        "noted": list(ledger.noted),
        "ends": [
            f"{count} {name}: {end}, {reason}"
            for (name, end, reason), count in sorted(ledger.counts.items())
        ],
        "memory": memory_table(run.samples),
    }


def after_warm_up(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """The samples that the slope is taken over."""
    span_s = samples[-1].time_s - samples[0].time_s
    start_s = samples[0].time_s + min(WARM_UP_S, span_s * WARM_UP_RATIO)
    return [sample for sample in samples if sample.time_s >= start_s]


def pss_of_tree(sample: MemorySample) -> int:
    """What the whole tree occupies, in bytes."""
    return sample.total.pss_bytes


def allocated_of_tree(sample: MemorySample) -> int:
    """The part without files, in bytes."""
    return sample.total.allocated_bytes


def allocated_of(process: str) -> Callable[[MemorySample], int]:
    """The part without files of one process, in bytes."""
    return lambda sample: sample.by_process.get(process, NOTHING).allocated_bytes


def slope_mib_per_min(
    samples: Sequence[MemorySample], size_of: Callable[[MemorySample], int]
) -> float:
    """Growth of a size in bytes, of the smallest reading of each window: what a program holds for
    the length of a round or of a prompt comes and goes, what leaks is in every reading."""
    lowest: dict[int, MemorySample] = {}
    for sample in samples:
        window = int((sample.time_s - samples[0].time_s) / WINDOW_S)
        kept = lowest.get(window)
        if kept is None or size_of(sample) < size_of(kept):
            lowest[window] = sample
    times_s = [sample.time_s for sample in lowest.values()]
    return slope_per_s(times_s, [float(size_of(one)) for one in lowest.values()]) * 60 / MIB


def processes(samples: Sequence[MemorySample]) -> list[str]:
    """Labels that occur, largest first."""
    largest: dict[str, int] = {}
    for sample in samples:
        for name, memory in sample.by_process.items():
            largest[name] = max(largest.get(name, 0), memory.pss_bytes)
    return sorted(largest, key=lambda name: -largest[name])


def memory_table(samples: Sequence[MemorySample]) -> list[JsonValue]:
    """One line a sample: seconds, MiB of the tree and of its part without files, then of each
    process."""
    labels = processes(samples)
    rows: list[JsonValue] = ["s total allocated " + " ".join(labels)]
    for sample in samples:
        sizes = [sample.by_process.get(name, NOTHING).pss_bytes for name in labels]
        columns = (pss_of_tree(sample), allocated_of_tree(sample), *sizes)
        cells = " ".join(f"{size / MIB:.1f}" for size in columns)
        rows.append(f"{sample.time_s - samples[0].time_s:.0f} {cells}")
    return rows


def live_requests(reading: Exposition) -> float:
    """Requests the engine still has."""
    return reading.value(names.REQUESTS_RUNNING) + reading.value(names.REQUESTS_WAITING)


def held_pages(reading: Exposition) -> float:
    """Pages that are not free."""
    return reading.value(names.PAGES_TOTAL) - reading.value(names.PAGES_FREE)


def engine_balance(grown: Exposition) -> float:
    """Requests the engine admitted and neither finished nor failed; 0 unless some were lost."""
    failures = grown.by_label(names.REQUESTS_FAILED, "code")
    failed = sum(count for code, count in failures.items() if code not in REFUSAL_CODES)
    admitted = grown.value(names.REQUESTS_ADMITTED)
    return admitted - grown.value(names.REQUESTS_FINISHED) - failed


def run_soak(
    service: Service, prompts: Mapping[str, Sequence[Prompt]], minutes: float, console: Console
) -> Soak:
    """Load the service, then wait until it is idle."""
    before = service.settled_metrics()
    traffic = Traffic(
        service.base_url,
        service.target.model,
        prompts,
        context_tokens=service.target.engine["context_tokens"],
    )
    with MemorySampler(service.pid, period_s=SAMPLE_PERIOD_S) as memory:
        asyncio.run(_run_and_tell(traffic, minutes, memory, console))
    last = wait_until_idle(service)
    return Soak(minutes, traffic.ledger, tuple(memory.samples), last.since(before), last)


async def _run_and_tell(
    traffic: Traffic, minutes: float, memory: MemorySampler, console: Console
) -> None:
    async def tell() -> None:
        while True:
            await asyncio.sleep(60)
            ledger, size = traffic.ledger, pss_of_tree(memory.samples[-1]) / MIB
            text = (
                f"{ledger.sent} sent, {ledger.total('finished')} finished, "
                f"{ledger.total('refused')} refused, {ledger.total('cancelled')} cancelled, "
                f"{ledger.total('lost')} lost, {ledger.unexpected} unexpected; {size:.0f} MiB"
            )
            console.print(text, highlight=False)

    telling = asyncio.create_task(tell())
    try:
        await traffic.run(minutes * 60)
    finally:
        telling.cancel()


def wait_until_idle(service: Service) -> Exposition:
    """The first reading without live requests and with every page free, or the last in time."""
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        reading = service.settled_metrics()
        idle = not held_pages(reading) and not live_requests(reading)
        if idle or time.monotonic() > deadline_s:
            return reading


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=OFFICIAL_MINUTES, help="length of the load"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="another checkpoint; prints, writes nothing"
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, JSON lines")
    parser.add_argument("--threads", type=int, help="threads a rank; prints, writes nothing")
    parser.add_argument("--port", type=int, help="another port than the deployment's")
    options = parser.parse_args(arguments)
    leave_on_terminate()
    console = Console()
    try:
        with open_target(
            checkpoint=options.checkpoint, port=options.port, threads=options.threads
        ) as target:
            prompts = load_prompts(options.prompts, target.checkpoint)
            with serving(target) as service:
                console.print(f"ready after {service.startup_s:.1f} s", highlight=False)
                found = run_soak(service, prompts, options.minutes, console)
    except BenchmarkFailure as failure:
        print(f"soak failed: {failure}", file=sys.stderr)
        return 2
    metrics = soak_metrics(found)
    changed = options.checkpoint is not None or options.threads is not None
    official = options.minutes >= OFFICIAL_MINUTES and not changed
    return conclude(RESULT, metrics, BOUNDS, console, official=official)


if __name__ == "__main__":
    raise SystemExit(main())

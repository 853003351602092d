"""From what the arms recorded to the metrics of the result file, and to short tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import median

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table

from benchmarks.serving.acceptance import Acceptance
from benchmarks.serving.arms import LANES, ServiceArm
from benchmarks.serving.client import Observation, Pass
from benchmarks.serving.memory import MemorySample
from benchmarks.serving.peer import THREAD_COUNTS, PeerResult
from benchmarks.serving.workload import PROSE
from benchmarks.support.results import Bound
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition

BOUNDS = (
    Bound(metric="speedup_vs_transformers_b1", operator=">=", value=8.0),
    Bound(metric="spec_vs_off_b1", operator=">=", value=1.8),
    Bound(metric="spec_vs_off_b4", operator=">=", value=1.0),
    Bound(metric="mean_emitted_d5_prose", operator=">=", value=1.9),
    Bound(metric="mean_emitted_d5_tool", operator=">=", value=4.5),
    Bound(metric="peak_memory_gib", operator="<=", value=4.0),
    Bound(metric="controller_ms_per_round_b4", operator="<=", value=0.5),
    Bound(metric="ttft_vs_prefill", operator="<=", value=3.0),
    Bound(metric="startup_s", operator="<=", value=60.0),
)
GIB = 2**30
OBSERVATION_COLUMNS = "category place completion_tokens first_ms total_ms finish_reason"
PEER_COLUMNS = "category place threads completion_tokens total_ms"


@dataclass(frozen=True, slots=True)
class FirstLight:
    """Everything one run measured."""

    adaptive: ServiceArm
    off: ServiceArm
    peer: PeerResult
    sampled: Mapping[str, Acceptance]
    greedy: Mapping[str, Acceptance]
    settings: Mapping[str, JsonValue]


def first_light_metrics(run: FirstLight) -> dict[str, JsonValue]:
    """The result file's metrics: targets first, then what they come from."""
    first_s = median(one.first_s for one in run.adaptive.first_tokens)
    prefill_s = median(one.prefill_s for one in run.adaptive.first_tokens)
    peer_rate = run.peer.tokens_per_s(run.peer.threads)
    peak = max((run.adaptive.peak, run.off.peak), key=lambda sample: sample.total.pss_bytes)
    metrics: dict[str, JsonValue] = {
        "speedup_vs_transformers_b1": run.adaptive.tokens_per_s(1) / peer_rate,
        "spec_vs_off_b1": run.adaptive.tokens_per_s(1) / run.off.tokens_per_s(1),
        "spec_vs_off_b4": run.adaptive.tokens_per_s(4) / run.off.tokens_per_s(4),
        "mean_emitted_d5_prose": together(run.sampled, PROSE).mean_emitted,
        **{f"mean_emitted_d5_{name}": one.mean_emitted for name, one in run.sampled.items()},
        "peak_memory_gib": peak.total.pss_bytes / GIB,
        "controller_ms_per_round_b4": controller_ms(run.adaptive.steady),
        "ttft_vs_prefill": first_s / prefill_s,
        "startup_s": max(run.adaptive.startups_s),
    }
    return metrics | {
        "settings": dict(run.settings),
        "service": {"adaptive": _arm(run.adaptive), "off": _arm(run.off)},
        "transformers": _peer(run.peer),
        "first_token": {
            "first_p50_ms": first_s * 1e3,
            "prefill_pass_p50_ms": prefill_s * 1e3,
            "pairs_ms": [
                f"{one.first_s * 1e3:.2f} {one.prefill_s * 1e3:.2f}"
                for one in run.adaptive.first_tokens
            ],
        },
        "acceptance_d5_sampled": _acceptance(run.sampled),
        "acceptance_d5_greedy": _acceptance(run.greedy),
        "peak_memory_by_process_mib": _mib(peak),
    }


def controller_ms(windows: Sequence[Exposition]) -> float:
    """CPU time of the controller's thread a round, over windows in which every lane was busy."""
    rounds = sum(window.value(names.ROUNDS) for window in windows)
    return sum(window.value(names.CONTROLLER_CPU) for window in windows) / rounds * 1e3


def together(found: Mapping[str, Acceptance], categories: Sequence[str]) -> Acceptance:
    """Rounds of several categories as one."""
    return reduce(add, (found[category] for category in categories))


def by_category(observations: Sequence[Observation]) -> dict[str, float]:
    """Completion tokens a second of each category's own streams."""
    tokens: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for one in observations:
        tokens[one.prompt.category] += one.completion_tokens
        seconds[one.prompt.category] += one.total_s
    return {category: tokens[category] / seconds[category] for category in tokens}


def _arm(arm: ServiceArm) -> dict[str, JsonValue]:
    return {
        "options": " ".join(arm.options) or "(the file as it is)",
        "startups_s": [round(value, 2) for value in arm.startups_s],
        "peak_memory_gib": arm.peak.total.pss_bytes / GIB,
        **{f"b{lanes}": _lanes(arm, lanes) for lanes in LANES},
    }


def _lanes(arm: ServiceArm, lanes: int) -> dict[str, JsonValue]:
    passes = arm.passes[lanes]
    observations = [one for done in passes for one in done.observations]
    rates: dict[str, JsonValue] = {
        name: round(rate, 2) for name, rate in by_category(observations).items()
    }
    return {
        "tokens_per_s": arm.tokens_per_s(lanes),
        "tokens": sum(done.tokens for done in passes),
        "passes_tokens_per_s": [round(done.tokens / done.wall_s, 2) for done in passes],
        "stream_tokens_per_s_by_category": rates,
        "rounds": _rounds(arm.rounds[lanes]),
        "observations": [OBSERVATION_COLUMNS, *_rows(passes)],
    }


def _rounds(grown: Sequence[Exposition]) -> dict[str, JsonValue]:
    """Where rounds spent their time, and how wide they were."""
    totals = {
        kind: sum(one.observations(names.ROUND_SECONDS, {"kind": kind}) for one in grown)
        for kind in ("prefill", "decode", "speculative")
    }
    found: dict[str, JsonValue] = {}
    for kind, count in totals.items():
        if not count:
            continue
        label = {"kind": kind}
        cost = sum(one.seconds(names.ROUND_SECONDS, label) for one in grown)
        device = sum(one.seconds(names.ROUND_DEVICE_SECONDS, label) for one in grown)
        found[kind] = {
            "count": count,
            "mean_ms": cost / count * 1e3,
            "mean_device_ms": device / count * 1e3,
        }
    all_rounds = sum(totals.values())
    cpu_s = sum(one.value(names.CONTROLLER_CPU) for one in grown)
    lane_rounds: dict[str, float] = defaultdict(float)
    for one in grown:
        for width, count in one.by_label(names.SPEC_LANE_ROUNDS, "verify_width").items():
            lane_rounds[width] += count
    emitted = sum(one.value(names.SPEC_EMITTED) for one in grown)
    return found | {
        "controller_cpu_ms": cpu_s / all_rounds * 1e3,
        "mean_emitted": emitted / sum(lane_rounds.values()),
        "lane_rounds_by_width": dict(sorted(lane_rounds.items())),
    }


def _rows(passes: Sequence[Pass]) -> list[JsonValue]:
    return [
        f"{one.prompt.category} {one.prompt.place} {one.completion_tokens} "
        f"{one.first_s * 1e3:.1f} {one.total_s * 1e3:.1f} {one.finish_reason}"
        for done in passes
        for one in done.observations
    ]


def _peer(peer: PeerResult) -> dict[str, JsonValue]:
    rates: dict[str, JsonValue] = {
        f"tokens_per_s_{threads}_threads": peer.tokens_per_s(threads) for threads in THREAD_COUNTS
    }
    rows: list[JsonValue] = [
        f"{run.category} {run.place} {run.threads} {run.completion_tokens} {run.total_s * 1e3:.0f}"
        for run in peer.runs
    ]
    return {"threads": peer.threads, **rates, "observations": [PEER_COLUMNS, *rows]}


def _acceptance(found: Mapping[str, Acceptance]) -> dict[str, JsonValue]:
    return {
        name: {
            "mean_emitted": one.mean_emitted,
            "rounds": one.rounds,
            "acceptance_rate": one.accepted / one.offered,
            "survival": [round(count / one.rounds, 3) for count in one.survived],
        }
        for name, one in {**found, "all": together(found, tuple(found))}.items()
    }


def _mib(sample: MemorySample) -> dict[str, JsonValue]:
    ordered = sorted(sample.by_process.items(), key=lambda item: -item[1].pss_bytes)
    return {name: round(memory.pss_bytes / 2**20, 1) for name, memory in ordered}


def print_tables(run: FirstLight, console: Console) -> None:
    """Rates by arm, and emitted tokens by category."""
    rates = Table(title="Completion tokens a second, mixed set")
    for heading in ("arm", "1 lane", "4 lanes"):
        rates.add_column(heading)
    for arm in (run.adaptive, run.off):
        rates.add_row(f"service, {arm.name}", *(f"{arm.tokens_per_s(n):.1f}" for n in LANES))
    for threads in THREAD_COUNTS:
        mark = "  <- counts" if threads == run.peer.threads else ""
        rate = f"{run.peer.tokens_per_s(threads):.1f}{mark}"
        rates.add_row(f"transformers, {threads} thread(s)", rate, "-")
    console.print(rates)
    emitted = Table(title="Mean emitted tokens a round, five drafts fixed")
    for heading in ("category", "sampled", "greedy"):
        emitted.add_column(heading)
    for category, one in run.sampled.items():
        greedy = f"{run.greedy[category].mean_emitted:.2f}"
        emitted.add_row(category, f"{one.mean_emitted:.2f}", greedy)
    console.print(emitted)

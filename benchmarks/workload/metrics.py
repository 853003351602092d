"""From a run's observations to the result file: the claims first, then what they come from."""

from __future__ import annotations

from pydantic import JsonValue

from benchmarks.support.results import Bound
from benchmarks.workload.arms import ADAPTIVE, FIXED, OFF
from benchmarks.workload.replay import Replayed
from flare_ray.workload.stats import Ratio
from flare_ray.workload.summary import (
    ALL,
    Cell,
    Run,
    best_of,
    cell_of,
    depths_of,
    equal_work,
    ratio_between,
)
from flare_ray.workload.tables import measures_of

BOUNDS = (
    Bound(metric="adaptive_vs_best_fixed_min", operator=">=", value=0.98),
    Bound(metric="adaptive_vs_off", operator=">=", value=1.0),
    Bound(metric="service_vs_replay", operator="<=", value=1.10),
    Bound(metric="unequal_requests", operator="<=", value=0),
    Bound(metric="failed_requests", operator="<=", value=0),
)


def workload_metrics(run: Run, replays: dict[str, Replayed]) -> dict[str, JsonValue]:
    """Targets, then per category and arm.

    `adaptive_vs_best_fixed_min` is over categories and on decoding time, which prompts do not
    dilute; `adaptive_vs_off` is over everything, prompts included. Both have a twin by CPU time.
    """
    fixed = [name for name in FIXED if name in run.arm_names]
    metrics: dict[str, JsonValue] = {}
    for suffix, measure in (("", "decode"), ("_cpu", "cpu")):
        if measure == "cpu" and "cpu" not in measures_of(run):
            continue
        worst = min(
            (_against_best(run, fixed, category, measure) for category in run.categories),
            key=lambda found: found[1].ratio,
        )
        metrics[f"adaptive_vs_best_fixed_min{suffix}"] = worst[1].ratio
        overall = _ratio(run, ADAPTIVE, OFF, ALL, "total" if not suffix else "cpu")
        metrics[f"adaptive_vs_off{suffix}"] = overall.ratio
    metrics |= {
        "service_vs_replay": max(one.ratio for one in replays.values()),
        "service_vs_replay_cpu": max(one.cpu_ratio for one in replays.values()),
        "unequal_requests": len(equal_work(run)),
        "failed_requests": sum(bool(one.error) for one in run.observations),
        "refused_arms": dict(run.refused),
        "replays": {name: replay_figures(one) for name, one in replays.items()},
        "workload": {
            "name": run.header.workload,
            "sha256": run.header.digest,
            **run.header.settings,
        },
        "categories": {
            category: _category(run, fixed, category) for category in (ALL, *run.categories)
        },
    }
    return metrics


def _against_best(run: Run, fixed: list[str], category: str, measure: str) -> tuple[str, Ratio]:
    best = best_of(run, fixed, category, measure=measure)
    return best, _ratio(run, ADAPTIVE, best, category, measure)


def _ratio(run: Run, arm: str, other: str, category: str, measure: str) -> Ratio:
    found = ratio_between(run, arm, other, category, measure=measure)
    if found is None:
        raise ValueError(f"{arm} and {other} share no finished session of {category}")
    return found


def _category(run: Run, fixed: list[str], category: str) -> dict[str, JsonValue]:
    best, against_best = _against_best(run, fixed, category, "decode")
    return {
        "best_fixed": best,
        "adaptive_vs_best_fixed": _shown(against_best),
        "adaptive_vs_off": _shown(_ratio(run, ADAPTIVE, OFF, category, "total")),
        "adaptive_vs_off_decode": _shown(_ratio(run, ADAPTIVE, OFF, category, "decode")),
        "arms": {arm: _arm(run, cell_of(run, arm, category)) for arm in run.arm_names},
    }


def _shown(ratio: Ratio) -> list[JsonValue]:
    """Ratio, lower and upper end of its 95 % interval."""
    return [round(value, 4) for value in (ratio.ratio, ratio.lower, ratio.upper)]


def _arm(run: Run, cell: Cell) -> dict[str, JsonValue]:
    depths = depths_of(run, cell.arm, cell.category)
    shares: list[JsonValue] = [
        round(accepted / verified, 3) if verified else None
        for verified, accepted in zip(depths.verified, depths.accepted, strict=True)
    ]
    tails: dict[str, JsonValue] = {
        name: {quantile: round(value, 2) for quantile, value in values.items()}
        for name, values in (
            ("first_ms", cell.ttft_ms),
            ("gap_ms", cell.itl_ms),
            ("whole_ms", cell.e2e_ms),
        )
    }
    return {
        "requests": cell.requests,
        "completion_tokens": cell.completion_tokens,
        "ends": dict(cell.reasons),
        "right_of_checked": [cell.right, cell.checked],
        "tokens_per_s": round(cell.tokens_per_s, 2),
        **tails,
        "drafts_offered_accepted_copied": [cell.offered, cell.accepted, cell.copied],
        "mean_emitted": round(cell.mean_emitted, 3),
        "accepted_by_depth": shares,
    }


def replay_figures(one: Replayed) -> dict[str, JsonValue]:
    """Ratios of one comparison and what they come from."""
    return {
        "service_vs_replay": one.ratio,
        "service_vs_replay_cpu": one.cpu_ratio,
        "service_s": one.service_s,
        "replay_s": one.replay_s,
        "device_s": one.device_s,
        "gap_us": one.gap_us,
        "graphs_count_ms": {name: list(cost) for name, cost in one.by_graph.items()},
        "rounds": one.rounds,
        "tokens": one.tokens,
    }

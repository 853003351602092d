"""The result file `policy`: simulated and live parts, each written by its own run, and targets."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from benchmarks.support.results import RESULTS, BenchmarkResult, Bound, print_result, read_result

NAME = "policy"
BOUNDS = (
    Bound(metric="min_vs_best_fixed", operator=">=", value=0.985),
    Bound(metric="min_vs_each_public_policy", operator=">=", value=0.99),
    Bound(metric="min_vs_oracle", operator=">=", value=0.95),
    Bound(metric="min_vs_oracle_shifting", operator=">=", value=0.92),
    Bound(metric="readaptation_rounds_max", operator="<=", value=50),
    Bound(metric="decision_us_16", operator="<=", value=30),
    Bound(metric="decision_us_256", operator="<=", value=150),
    Bound(metric="live_vs_best_fixed_min", operator=">=", value=0.98),
    Bound(metric="live_vs_best_fixed_lower_min", operator=">=", value=0.95),
    Bound(metric="live_useless_vs_width_one", operator="<=", value=1.02),
    Bound(metric="live_useless_vs_off", operator="<=", value=1.06),
)


def merged(
    metrics: dict[str, JsonValue], *, folder: Path = RESULTS
) -> tuple[dict[str, JsonValue], list[Bound]]:
    """A run's metrics beside what the other run left in the file, and the bounds that both allow.

    Metrics of the same name are replaced; a bound is judged once its metric has been measured.
    """
    path = folder / f"{NAME}.json"
    before = read_result(path).metrics if path.is_file() else {}
    everything = {**before, **metrics}
    return everything, [bound for bound in BOUNDS if bound.metric in everything]


def print_policy(result: BenchmarkResult) -> None:
    """Numbers, targets, and where the least of each was found."""
    console = Console()
    print_result(result, console)
    worst = result.metrics.get("worst_cells")
    if isinstance(worst, dict):
        for name, place in worst.items():
            console.print(f"least against {name}: {place}")

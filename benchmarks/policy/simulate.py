"""The policy against fixed widths, published policies and an oracle: `python -m
benchmarks.policy.simulate`.

Every trace, concurrency, token capacity and cost table is a cell; the engine's own policy object
plays it, told only what an engine would tell it. Some five minutes on one core. Results go to
`results/policy.json`, pictures to `results/policy_*.svg`. The live part of the file is measured by
`benchmarks.policy.live` and kept.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from benchmarks.policy.cells import CAPACITIES, CONCURRENCIES, Cell, run_trace
from benchmarks.policy.costs import all_costs, catalog
from benchmarks.policy.plots import heat_map
from benchmarks.policy.report import NAME, merged, print_policy
from benchmarks.policy.traces import all_traces
from benchmarks.support.results import RESULTS, write_result
from flare_ray.contracts.record import LaneRecord, Status
from flare_ray.controller.verification import (
    AdaptivePolicy,
    Cohort,
    CohortLane,
    CompletedRound,
)

ROUNDS = 2000
DECISIONS = 400


def decision_us(lanes: int, decisions: int = DECISIONS) -> tuple[float, float]:
    """Median CPU microseconds of a choice and of learning from a round, eight widths captured."""
    shapes, policy, rng = catalog(lanes, 8 * lanes), AdaptivePolicy(), random.Random(3)
    cohort = Cohort(tuple(CohortLane(uid, 7) for uid in range(1, lanes + 1)))
    chosen, learnt = [], []
    for number in range(decisions + 50):
        before = time.thread_time_ns()
        shape = policy.choose(cohort, shapes)
        after = time.thread_time_ns()
        record = CompletedRound(shape, _records(lanes, shape.draft_tokens, rng))
        cost_ns = round(5e6 * (1 + 0.1 * shape.draft_tokens) * rng.gauss(1.0, 0.05))
        begin = time.thread_time_ns()
        policy.observe(record, cost_ns)
        if number >= 50:
            chosen.append(after - before)
            learnt.append(time.thread_time_ns() - begin)
    return statistics.median(chosen) / 1e3, statistics.median(learnt) / 1e3


def _records(lanes: int, drafts: int, rng: random.Random) -> tuple[LaneRecord, ...]:
    records = []
    for uid in range(1, lanes + 1):
        passed = 0
        while passed < drafts and rng.random() < 0.8:
            passed += 1
        counts = (drafts, drafts, passed, passed + 1)
        records.append(
            LaneRecord(uid, 1, 0, int(Status.ACTIVE), 0, 0, 0, *counts, 0, 0, drafts + 1, 0, 0, ())
        )
    return tuple(records)


def summary(cells: Sequence[Cell]) -> dict[str, JsonValue]:
    """The figures that targets bound, and where the least of each was found."""
    names = sorted({name for cell in cells for name in cell.public})
    least = {name: min(cells, key=lambda cell: cell.vs_public[name]) for name in names}
    public = min(least[name].vs_public[name] for name in names)
    steady = [cell for cell in cells if not cell.shifting] or cells
    shifting = [cell for cell in cells if cell.shifting] or cells
    worst_fixed = min(cells, key=lambda cell: cell.vs_fixed)
    readapted = [rounds for cell in cells for rounds in cell.readapted]
    from_zero = [rounds for cell in cells for rounds in cell.readapted_from_zero]
    return {
        "min_vs_best_fixed": worst_fixed.vs_fixed,
        "min_vs_each_public_policy": public,
        "min_vs_oracle": min(cell.vs_oracle for cell in steady),
        "min_vs_oracle_shifting": min(cell.vs_oracle for cell in shifting),
        "mean_vs_best_fixed": statistics.fmean(cell.vs_fixed for cell in cells),
        "mean_vs_oracle": statistics.fmean(cell.vs_oracle for cell in cells),
        "max_probe_share": max(cell.probe_share for cell in cells),
        "readaptation_rounds_max": max(readapted, default=0),
        "readaptation_from_zero_rounds_max": max(from_zero, default=0),
        "readaptation_from_zero_rounds_median": statistics.median(from_zero) if from_zero else 0,
        "readaptation_rounds_median": statistics.median(readapted) if readapted else 0,
        "worst_cells": {
            "fixed": _place(worst_fixed),
            **{name: _place(least[name], least[name].vs_public[name]) for name in names},
        },
        "cells": len(cells),
    }


def _place(cell: Cell, ratio: float | None = None) -> str:
    value = cell.vs_fixed if ratio is None else ratio
    return f"{cell.trace}, {cell.table}, {cell.lanes} lanes, {cell.capacities[0]}: {value:.4f}"


def table(cells: Sequence[Cell]) -> list[str]:
    """One line a cell: ratios to the best fixed count, the nearest public policy, the oracle."""
    return [
        "trace table lanes capacities best_fixed_drafts common_width vs_fixed vs_public vs_oracle "
        "probe_share",
        *(
            f"{c.trace} {c.table} {c.lanes} {'+'.join(map(str, c.capacities))} "
            f"{c.fixed.index(max(c.fixed))} {c.common_width} {c.vs_fixed:.4f} "
            f"{min(c.vs_public.values()):.4f} {c.vs_oracle:.4f} {c.probe_share:.4f}"
            for c in cells
        ),
    ]


def run(
    traces: Sequence[str], concurrencies: Sequence[int], rounds: int
) -> tuple[dict[str, JsonValue], list[Cell]]:
    """Play every cell; the metrics and the cells."""
    makers, tables = all_traces(rounds), all_costs()
    cells: list[Cell] = []
    for name in traces:
        started = time.perf_counter()
        cells += run_trace(makers[name](), tables, concurrencies, rounds=rounds)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    small, small_learning = decision_us(16)
    large, large_learning = decision_us(256)
    metrics: dict[str, JsonValue] = {
        **summary(cells),
        "decision_us_16": small,
        "decision_us_256": large,
        "learning_us_16": small_learning,
        "learning_us_256": large_learning,
        "settings": {
            "rounds": rounds,
            "traces": list(traces),
            "concurrencies": list(concurrencies),
            "capacities": list(CAPACITIES),
            "tables": [table_.name for table_ in tables],
        },
        "table": list(table(cells)),
    }
    return metrics, cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--traces", default=",".join(all_traces(ROUNDS)))
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)))
    parser.add_argument("--out", type=Path, default=RESULTS, help="Folder of result and pictures.")
    options = parser.parse_args(arguments)
    concurrencies = [int(lanes) for lanes in options.concurrency.split(",")]
    metrics, cells = run(options.traces.split(","), concurrencies, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(cell.table for cell in cells):
        rows = [cell for cell in cells if cell.table == name]
        (options.out / f"policy_{name}.svg").write_text(heat_map(name, rows), encoding="utf-8")
    everything, bounds = merged(metrics, folder=options.out)
    print_policy(write_result(NAME, everything, bounds, folder=options.out))


if __name__ == "__main__":
    main()

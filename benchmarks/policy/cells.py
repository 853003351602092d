"""Cells of the simulation and what is measured in each."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.policy.costs import CostTable
from benchmarks.policy.players import (
    Run,
    Stage,
    observed_noise,
    play_fixed,
    play_oracle,
    play_policy,
    priced,
)
from benchmarks.policy.public import PUBLIC, batch_schedule_drafts
from benchmarks.policy.traces import Floats, Trace
from flare_ray.controller.verification import AdaptivePolicy
from flare_ray.controller.verification.adaptive import Objective

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CAPACITIES = (128, 1024)
REPEATED_LANES = 8
WINDOW_ROUNDS = 20
ADAPTED = 0.95
"""A policy has adapted once its choices over a window reach this share of the best ratio."""


@dataclass(frozen=True)
class Cell:
    """One trace at one concurrency under one cost table and the capacities with this catalog.

    Attributes:
        fixed: goodput of each captured draft count, tokens a second.
        public: goodput of each public policy, tokens a second.
        probe_share: predicted loss of all probes over all time.
        readapted: rounds after each turn until choices are good again; of turns from texts where
            width one was best in `readapted_from_zero`, since there only probes can notice.
    """

    trace: str
    shifting: bool
    table: str
    lanes: int
    capacities: tuple[int, ...]
    fixed: tuple[float, ...]
    public: dict[str, float]
    oracle: float
    adaptive: float
    probe_share: float
    common_width: int
    readapted: tuple[int, ...] = ()
    readapted_from_zero: tuple[int, ...] = ()

    @property
    def vs_fixed(self) -> float:
        """Adaptive over the best fixed count in hindsight."""
        return self.adaptive / max(self.fixed)

    @property
    def vs_public(self) -> dict[str, float]:
        """Adaptive over each public policy."""
        return {name: self.adaptive / goodput for name, goodput in self.public.items()}

    @property
    def vs_oracle(self) -> float:
        """Adaptive over the oracle."""
        return self.adaptive / self.oracle


def run_trace(
    trace: Trace,
    tables: Sequence[CostTable],
    concurrencies: Sequence[int],
    *,
    rounds: int,
    objective: Objective = "throughput",
) -> Iterator[Cell]:
    """All cells of one trace in which there is something to choose."""
    for lanes in concurrencies:
        stages = [Stage(trace, lanes, rounds, first) for first in _firsts(lanes)]
        emitted = np.mean([play_fixed(stage) for stage in stages], 0)
        for table in tables:
            for capacities in _distinct(lanes):
                if not table.covers(lanes, capacities[0]):
                    continue
                if len(priced(table, lanes, capacities[0])[0]) > 1:
                    yield _cell(stages, table, capacities, emitted, objective)


def _firsts(lanes: int) -> list[int]:
    """First lanes of the stages that a cell pools: at few lanes, several texts, since one text's
    turns are too few to compare policies by."""
    return [lanes * number for number in range(max(1, REPEATED_LANES // lanes))]


def _distinct(lanes: int) -> list[tuple[int, ...]]:
    """Capacities grouped by the catalog they give at this concurrency."""
    groups: dict[int, tuple[int, ...]] = {}
    for capacity in CAPACITIES:
        most = min(8, max(1, capacity // lanes))
        groups[most] = (*groups.get(most, ()), capacity)
    return list(groups.values())


def _pooled(runs: Sequence[Run]) -> Run:
    return Run(
        np.sum([run.emitted for run in runs], 0),
        np.sum([run.price_ns for run in runs], 0),
        [width for run in runs for width in run.widths],
        sum(run.probe_ns for run in runs),
    )


def _cell(
    stages: Sequence[Stage],
    table: CostTable,
    capacities: tuple[int, ...],
    emitted: Floats,
    objective: Objective,
) -> Cell:
    trace, lanes, rounds = stages[0].trace, stages[0].lanes, stages[0].rounds
    shapes, prices = priced(table, lanes, capacities[0])
    fixed = emitted[: len(prices)] / prices
    draft_ns = table.price.draft_ns(lanes)
    public = {
        name: _pooled([play(stage, prices, draft_ns) for stage in stages]).goodput
        for name, play in PUBLIC.items()
    }
    public["batch_schedule"] = float(fixed[batch_schedule_drafts(lanes, len(prices) - 1)])
    measured = {shape: round(price) for shape, price in zip(shapes, prices.tolist(), strict=True)}
    runs = []
    for stage in stages:
        name = f"{trace.name} {lanes} {stage.first} {table.name} {capacities}"
        noise = observed_noise(rounds, zlib.crc32(name.encode()))
        policy = AdaptivePolicy(measured, objective=objective)
        runs.append(play_policy(stage, shapes, prices, policy, noise))
    run = _pooled(runs)
    found = [readaptation(stage, prices, r) for stage, r in zip(stages, runs, strict=True)]
    turns = [int(np.median(turn)) for turn in zip(*found, strict=True)]
    before = [offset for _, offset in trace.turns[:-1]]
    drafted = [(stages[0].expected[o, : len(prices)] / prices).argmax() > 0 for o in before]
    return Cell(
        trace=trace.name,
        shifting=trace.shifting,
        table=table.name,
        lanes=lanes,
        capacities=capacities,
        fixed=tuple((fixed * 1e9).tolist()),
        public={name: goodput * 1e9 for name, goodput in sorted(public.items())},
        oracle=_pooled([play_oracle(stage, prices) for stage in stages]).goodput * 1e9,
        adaptive=run.goodput * 1e9,
        probe_share=run.probe_ns / float(run.price_ns.sum()),
        common_width=Counter(run.widths).most_common(1)[0][0],
        readapted=tuple(r for r, some in zip(turns, drafted, strict=True) if some),
        readapted_from_zero=tuple(r for r, some in zip(turns, drafted, strict=True) if not some),
    )


def readaptation(stage: Stage, prices: Floats, run: Run) -> tuple[int, ...]:
    """Rounds after each turn of the workload until choices are good again: the first round from
    which a window of them reaches ADAPTED of the best ratio."""
    turns = stage.trace.turns[1:]
    found = []
    for number, (begin, offset) in enumerate(turns):
        end = turns[number + 1][0] if number + 1 < len(turns) else stage.rounds
        ratios = stage.expected[offset, : len(prices)] / prices
        reached = (ratios / ratios.max())[np.array(run.widths[begin:end]) - 1]
        means = np.convolve(reached, np.ones(WINDOW_ROUNDS) / WINDOW_ROUNDS, "valid")
        good = np.flatnonzero(means >= ADAPTED)
        found.append(int(good[0]) if len(good) else end - begin)
    return tuple(found)

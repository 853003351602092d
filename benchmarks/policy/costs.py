"""Cost tables: what a round of each shape takes, in nanoseconds.

- `SparseMixture`: a bytes model of GLM-5.3-Flash. Six rows touch 5.6 times the experts of one, so a
  row is dear while few rows share experts, cheap once most experts are read anyway, and dear again
  when arithmetic limits. Figures from the published configuration; no measurement enters it.
- `measured`: medians of complete rounds of the demo checkpoint on a CPU.
- `measured_gpu`: whole rounds of GLM-5.3-Flash's layers in NVFP4 on one H200, from the result file
  of `benchmarks.rounds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.policy.traces import RECORDED
from benchmarks.support.results import RESULTS
from flare_ray.contracts.shapes import GraphShape, speculative_shapes

GPU_RESULT = RESULTS / "gpu_rounds.json"
GPU_ROUNDS = "nvfp4"
"""Metric of that file with one row a program: batch, width, round_us."""


class Price(Protocol):
    """What a round costs, in nanoseconds, and one drafter pass of it."""

    def __call__(self, shape: GraphShape) -> float: ...

    def draft_ns(self, lanes: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class SparseMixture:
    """Bytes and operations of one speculative round; sizes are of the whole model.

    Attributes:
        ranks: tensor parallel degree; bytes and operations are divided by it.
        bandwidth: bytes a second that one rank reads.
        flops: operations a second that one rank reaches.
        dense_bytes: weights that every target pass reads.
        expert_bytes: weights of one routed expert, all layers together.
        experts / chosen: routed experts of a layer, and those of one token.
        row_flops: operations of one target row.
        row_bytes: state that one row writes and a lane reads.
        draft_bytes / draft_expert_bytes: the same for one drafter pass.
        overhead_ns / draft_overhead_ns: launches and collectives of a target and a drafter pass.
    """

    ranks: int = 4
    bandwidth: float = 4.8e12 * 0.8
    flops: float = 9.9e14 * 0.5
    dense_bytes: float = 2 * (4.683e9 + 1.292e9 + 0.082e9 + 1.057e9 + 0.453e9 + 0.634e9)
    expert_bytes: float = 304.406e9 / 288 * 0.5625
    experts: int = 288
    chosen: int = 8
    row_flops: float = 2 * 16.7e9
    row_bytes: float = 2 * 136 * 2**20
    draft_bytes: float = 2 * (0.185e9 + 0.634e9)
    draft_expert_bytes: float = 7.248e9 / 288 * 0.5625
    overhead_ns: float = 450e3
    draft_overhead_ns: float = 60e3

    def __call__(self, shape: GraphShape) -> float:
        lanes = shape.batch_capacity
        rows = shape.packed_capacity or lanes * shape.verify_width
        read = self.dense_bytes + self._touched(rows) * self.expert_bytes
        read += rows * self.row_bytes
        memory_s = read / self.ranks / self.bandwidth
        compute_s = rows * self.row_flops / self.ranks / self.flops
        # Absorption is one more drafter pass without the head.
        passes = shape.draft_tokens + 0.5
        target_ns = max(memory_s, compute_s) * 1e9 + self.overhead_ns
        return target_ns + passes * self.draft_ns(lanes)

    def draft_ns(self, lanes: int) -> float:
        """One drafter pass."""
        read = self.draft_bytes + self._touched(lanes) * self.draft_expert_bytes
        return read / self.ranks / self.bandwidth * 1e9 + self.draft_overhead_ns

    def _touched(self, rows: int) -> float:
        """Experts of a layer that so many independently routed rows read."""
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** rows)


class Table:
    """Round times by lanes and width; between measured lanes along a line, in their logarithm."""

    def __init__(self, cost_ns: Mapping[str, Mapping[str, float]]) -> None:
        self._by_lanes = {
            int(lanes): {int(width): float(ns) for width, ns in row.items()}
            for lanes, row in cost_ns.items()
        }

    @property
    def most_lanes(self) -> int:
        """Largest batch that was measured."""
        return max(self._by_lanes)

    def __call__(self, shape: GraphShape) -> float:
        lanes, width = shape.batch_capacity, shape.verify_width
        if lanes in self._by_lanes:
            return self._by_lanes[lanes][width]
        low = max(b for b in self._by_lanes if b < lanes)
        high = min(b for b in self._by_lanes if b > lanes)
        share = math.log(lanes / low) / math.log(high / low)
        a, b = self._by_lanes[low][width], self._by_lanes[high][width]
        return a + (b - a) * share

    def draft_ns(self, lanes: int) -> float:
        """Half of what one more draft costs, its target row being the other half; a guess, since
        complete rounds do not tell them apart."""
        low = max(b for b in self._by_lanes if b <= lanes)
        row = self._by_lanes[low]
        return (row[max(row)] - row[1]) / (max(row) - 1) / 2


class Banded:
    """A dense model whose kernel changes with the rows: cheap through 8, a step, cheap again
    through 64, then in proportion."""

    def __call__(self, shape: GraphShape) -> float:
        rows = shape.batch_capacity * shape.verify_width
        target = 3.0 if rows <= 8 else 4.2 if rows <= 64 else 4.2 + (rows - 64) / 48
        return 1e6 * target + shape.draft_tokens * self.draft_ns(shape.batch_capacity)

    def draft_ns(self, lanes: int) -> float:
        """One drafter pass."""
        return 0.25e6


@dataclass(frozen=True)
class CostTable:
    """A price by shape, and the largest batch and number of rows it holds for."""

    name: str
    price: Price
    most_lanes: int = 256
    most_rows: int = 2048

    def covers(self, lanes: int, token_capacity: int) -> bool:
        """Whether every program of this catalog has a price."""
        widest = catalog(lanes, token_capacity)[-1].verify_width
        return lanes <= self.most_lanes and lanes * widest <= self.most_rows


def all_costs(recorded: Path = RECORDED, gpu: Path = GPU_RESULT) -> list[CostTable]:
    """The bytes model, the banded model, the measured CPU, and a GPU's file if there is one."""
    cpu = Table(json.loads(recorded.read_text(encoding="utf-8"))["cost_ns"])
    tables = [
        CostTable("glm-bytes", SparseMixture()),
        CostTable("banded", Banded()),
        CostTable("cpu-demo", cpu, cpu.most_lanes),
    ]
    if gpu.is_file():
        tables.append(measured_gpu(gpu))
    return tables


def measured_gpu(path: Path) -> CostTable:
    """The rounds of a GPU result file."""
    rows = json.loads(path.read_text(encoding="utf-8"))["metrics"][GPU_ROUNDS].values()
    cost_ns: dict[str, dict[str, float]] = {}
    for row in rows:
        by_width = cost_ns.setdefault(str(row["batch"]), {})
        by_width[str(row["width"])] = 1e3 * row["round_us"]
    table = Table(cost_ns)
    most_rows = max(row["batch"] * row["width"] for row in rows)
    return CostTable("h200-measured", table, table.most_lanes, most_rows)


def catalog(lanes: int, token_capacity: int) -> tuple[GraphShape, ...]:
    """Captured shapes of a full batch, narrowest first (contract: G1)."""
    shapes = speculative_shapes(lanes, range(1, 9), token_capacity)
    largest = max(shape.batch_capacity for shape in shapes)
    return tuple(shape for shape in shapes if shape.batch_capacity == largest)

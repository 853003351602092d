"""Captured rounds at GLM-5.3-Flash's released layer sizes: time, parts, and share of the bandwidth.

    python -m benchmarks.rounds.gpu [--quick] [--formats nvfp4,plain] [--folder results]

Layers 0 to 15 with all 288 experts in NVFP4, or layers 0 to 7 in bfloat16, vocabulary head and
drafter layer; random weights made on the device. A round is captured as the engine's round function
runs it and replayed from one and the same state; its parts are differences between graphs that
stop after each. `bandwidth_ratio` is the time in which the card would read the round's bytes, over
the measured time.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.timing import bandwidths, captured, replay_us
from benchmarks.rounds.engine import PARTS, Rank, TimedRound, build_rank
from benchmarks.rounds.floor import round_bytes
from benchmarks.rounds.geometry import geometry
from benchmarks.rounds.profile import largest_kernels
from benchmarks.support.results import RESULTS, Bound, print_result, write_result
from flare_ray.device.weights.formats import WeightFormat

FORMATS = {
    "nvfp4": WeightFormat.NVFP4_MODELOPT,
    "plain": WeightFormat.PLAIN,
    "fp8": WeightFormat.FP8_BLOCK,
}
LAYERS = {"nvfp4": 16, "plain": 8, "fp8": 12}
BATCHES, WIDTHS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 5, 6, 7, 8)
FEW_WIDTHS = (1, 6)
QUICK = ((1, 1), (1, 6), (4, 6))
PROFILED = ((1, 1), (1, 6))
TOKEN_CAPACITY = 128
CONTEXT = 1000


def shapes(form: str, *, quick: bool) -> list[tuple[int, int]]:
    """(B, W) of the table: those that a catalog captures, few of the formats beside NVFP4."""
    if quick:
        return list(QUICK)
    widths = WIDTHS if form == "nvfp4" else FEW_WIDTHS
    return [(b, w) for b in BATCHES for w in widths if w == 1 or b * w <= TOKEN_CAPACITY]


def measured(
    rank: Rank, form: str, batch: int, width: int, read_tb_s: float, *, parts: bool
) -> dict[str, Any]:
    """One row of the table."""
    timed = TimedRound(rank, batch=batch, width=width)
    moved = round_bytes(rank.geometry, FORMATS[form], batch=batch, width=width, context=CONTEXT)
    whole = replay_us(captured([timed.restore, timed.run]))
    floor = sum(moved.values()) / read_tb_s / 1e6
    row: dict[str, Any] = {
        "batch": batch,
        "width": width,
        "round_us": round(whole, 1),
        "bytes_mb": round(sum(moved.values()) / 1e6, 1),
        "bandwidth_ratio": round(floor / whole, 4),
    }
    if parts:
        before = 0.0
        for part in PARTS:
            until = whole
            if part != PARTS[-1]:
                until = replay_us(captured([timed.restore, timed.upto(part)]))
            row[f"{part}_us"] = round(until - before, 1)
            row[f"{part}_floor_us"] = round(moved[part] / read_tb_s / 1e6, 1)
            before = until
    return row


def table(form: str, read_tb_s: float, *, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(every shape of one format, the kernels of PROFILED), by shape."""
    rows: dict[str, Any] = {}
    chosen = shapes(form, quick=quick)
    slots = max(batch for batch, _ in chosen)
    rank = build_rank(geometry(LAYERS[form]), FORMATS[form], slots=slots, context=CONTEXT)
    print(f"{form}: {torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated", flush=True)
    for batch, width in chosen:
        row = measured(rank, form, batch, width, read_tb_s, parts=width in FEW_WIDTHS)
        rows[f"b{batch}w{width}"] = row
        print(form, row, flush=True)
    profiles = {}
    for batch, width in PROFILED:
        timed = TimedRound(rank, batch=batch, width=width)
        graph = captured([timed.restore, timed.run])
        profiles[f"b{batch}w{width}"] = largest_kernels(graph)
    return rows, profiles


def main() -> None:
    """Measure, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes")
    parser.add_argument("--formats", default="nvfp4,plain")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    metrics: dict[str, Any] = {k: round(v, 3) for k, v in bandwidths().items()}
    print(metrics, flush=True)
    with torch.inference_mode():
        for form in options.formats.split(","):
            rows, profiles = table(form, metrics["read_tb_s"], quick=options.quick)
            metrics |= {form: rows, f"{form}_profile": profiles}
            _write(metrics, options.folder)
            gc.collect()
            torch.cuda.empty_cache()


def _write(metrics: dict[str, Any], folder: Path) -> None:
    """Judge and write what has been measured so far; an interrupted run leaves whole formats."""
    bounds = []
    if "nvfp4" in metrics:
        metrics["bandwidth_ratio_b1w1"] = metrics["nvfp4"]["b1w1"]["bandwidth_ratio"]
        bounds.append(Bound(metric="bandwidth_ratio_b1w1", operator=">=", value=0.5))
        share = metrics["nvfp4"]["b1w6"]
        metrics["sampler_share_b1w6"] = round(share["sampler_us"] / share["round_us"], 4)
        bounds.append(Bound(metric="sampler_share_b1w6", operator="<=", value=0.2))
    if "plain" in metrics:
        metrics["bandwidth_ratio_b1w1_bfloat16"] = metrics["plain"]["b1w1"]["bandwidth_ratio"]
        bounds.append(Bound(metric="bandwidth_ratio_b1w1_bfloat16", operator=">=", value=0.6))
    print_result(write_result("gpu_rounds", metrics, bounds, folder=folder))


if __name__ == "__main__":
    main()

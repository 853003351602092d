"""``python -m benchmarks.serving.history``: what copied drafts are worth (contract: H1 to H3).

Engines of this process take turns on the same conversations of the frozen workload, one request at
a time: no drafter, adaptive, adaptive with copies from shared history, from the request's own text
and from both, and those copies without any other draft. Sampling is the checkpoint's default, drawn
by position, so all arms write equal texts. Code edits run on every arm, the other categories on
adaptive and on adaptive with copies from both. Requests of a block share one `cache_salt`, hence
one history; no text comes twice under the same one.

    history_vs_adaptive_edits       adaptive with copies from both over adaptive alone
    history_vs_adaptive_other_min   the same elsewhere, the worst category
    copies_only_vs_off_edits        copies alone over no drafter
    lookup_us                       CPU time of a look-up in a full ring
    state_bytes_ratio               Qwen's saved column over its record, bytes a position (R10)

Speeds are those of decoding, which prompts do not dilute; `_total` counts everything, `_cpu` by CPU
time. Writes `history.json`; estimated at four to five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.support.results import Bound, conclude, running_command
from benchmarks.workload.arms import (
    ADAPTIVE,
    ALONE,
    CHECKPOINT,
    COPYING,
    ENGINE,
    OFF,
    TEXT,
    started,
)
from flare_ray.controller.history.ring import RING_TOKENS, HistoryRing, Response
from flare_ray.controller.history.windows import window_of
from flare_ray.recipes.qwen4_exp.geometry import Geometry, read_geometry
from flare_ray.recipes.qwen4_exp.state import state_spec
from flare_ray.workload.arrivals import parse_arrivals
from flare_ray.workload.environment import describe
from flare_ray.workload.items import CATEGORIES
from flare_ray.workload.records import Header, Journal
from flare_ray.workload.runner import Runner, RunSettings
from flare_ray.workload.source import load_workload
from flare_ray.workload.summary import (
    Run,
    cell_of,
    copies_of,
    equal_work,
    ratio_between,
    read_run,
)
from flare_ray.workload.tokens import Encoder
from tests.recipes.qwen4_exp.published import published_config

RESULT = "history"
EDITS = "edit"
MEASURES = {"": "decode", "_total": "total", "_cpu": "cpu"}
"""Suffix of a metric -> what speeds are measured by."""
LOOKUPS = 20_000
BOUNDS = (
    Bound(metric="history_vs_adaptive_edits", operator=">=", value=1.15),
    Bound(metric="copies_only_vs_off_edits", operator=">=", value=2.0),
    Bound(metric="history_vs_adaptive_other_min", operator=">=", value=0.98),
    Bound(metric="lookup_us", operator="<=", value=20.0),
    Bound(metric="unequal_requests", operator="<=", value=0),
    Bound(metric="failed_requests", operator="<=", value=0),
)


@dataclass(frozen=True, slots=True)
class Part:
    """Categories, and the arms they run on."""

    name: str
    arms: tuple[str, ...]
    settings: RunSettings


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run; `engine`: settings of every engine besides its speculation."""

    parts: tuple[Part, ...]
    lookups: int = LOOKUPS
    engine: dict[str, Any] = field(default_factory=lambda: ENGINE)


def _settings(categories: tuple[str, ...], **fields: Any) -> RunSettings:
    return RunSettings(
        categories=categories,
        arrivals=parse_arrivals("closed:1"),
        reproducible=True,
        salted=True,
        **fields,
    )


OTHERS = tuple(name for name in CATEGORIES if name != EDITS)
# `warm`: a program's first two runs record it and are slow; arms meet their widths there.
OFFICIAL = Size(
    parts=(
        Part(EDITS, (OFF, ADAPTIVE, *COPYING), _settings((EDITS,), sessions=20, warm=4, chunk=5)),
        Part("others", (ADAPTIVE, TEXT), _settings(OTHERS, sessions=3, warm=2, repeats=2, chunk=3)),
    )
)
SMALL = Size(
    parts=(
        Part(
            EDITS,
            (OFF, ADAPTIVE, *COPYING),
            _settings((EDITS,), sessions=2, warm=2, chunk=1, max_tokens=24),
        ),
        Part(
            "others",
            (ADAPTIVE, TEXT),
            _settings(("chat", "tool_json"), sessions=2, warm=2, chunk=1, max_tokens=24),
        ),
    ),
    lookups=200,
)


def run_part(part: Part, size: Size, checkpoint: Path, out: Path, console: Console) -> Run:
    """Run every arm on every block into the folder `out`, and read it back."""
    workload = load_workload(encoder=Encoder(checkpoint))
    header = Header(
        workload=workload.name,
        digest=workload.digest,
        arms=part.arms,
        settings=msgspec.to_builtins(part.settings),
        environment=describe(running_command()),
    )
    with (
        Journal(out, header) as journal,
        started(part.arms, checkpoint, engine=size.engine) as running,
    ):
        if running.refused:
            raise BenchmarkFailure(f"arms did not start: {running.refused}")

        def on_block(done: int, total: int) -> None:
            console.print(f"{part.name}: block {done} of {total}", highlight=False)

        runner = Runner(journal, part.settings, tokens=workload.tokens, on_block=on_block)
        runner.run(running.arms, workload.items)
    return read_run(out)


def history_metrics(edits: Run, others: Run) -> dict[str, JsonValue]:
    """Targets, then per arm and category."""
    metrics: dict[str, JsonValue] = {}
    for suffix, measure in MEASURES.items():
        metrics[f"history_vs_adaptive_edits{suffix}"] = _ratio(
            edits, TEXT, ADAPTIVE, EDITS, measure
        )[0]
        metrics[f"copies_only_vs_off_edits{suffix}"] = _ratio(edits, ALONE, OFF, EDITS, measure)[0]
        metrics[f"history_vs_adaptive_other_min{suffix}"] = min(
            _ratio(others, TEXT, ADAPTIVE, category, measure)[0] for category in others.categories
        )
    runs = (edits, others)
    return {
        **metrics,
        "unequal_requests": sum(len(equal_work(run)) for run in runs),
        "failed_requests": sum(bool(one.error) for run in runs for one in run.observations),
        "edits": {arm: _arm(edits, arm, EDITS) for arm in edits.arm_names},
        "others": {
            category: {arm: _arm(others, arm, category) for arm in others.arm_names}
            for category in others.categories
        },
        "workload": {
            "name": edits.header.workload,
            "sha256": edits.header.digest,
            "edits": edits.header.settings,
            "others": others.header.settings,
        },
    }


def _ratio(run: Run, arm: str, other: str, category: str, measure: str) -> list[float]:
    """Speed of `arm` over that of `other`, lower and upper end of its 95 % interval."""
    found = ratio_between(run, arm, other, category, measure=measure)
    if found is None:
        raise BenchmarkFailure(f"{arm} and {other} share no finished session of {category}")
    return [round(value, 4) for value in (found.ratio, found.lower, found.upper)]


def _arm(run: Run, arm: str, category: str) -> dict[str, JsonValue]:
    cell = cell_of(run, arm, category)
    against: dict[str, JsonValue] = {
        f"vs_adaptive{suffix}": [*_ratio(run, arm, ADAPTIVE, category, measure)]
        for suffix, measure in MEASURES.items()
    }
    return {
        **against,
        "requests": cell.requests,
        "completion_tokens": cell.completion_tokens,
        "tokens_per_s": round(cell.tokens_per_s, 2),
        "drafts_offered_accepted": [cell.offered, cell.accepted],
        "mean_emitted": round(cell.mean_emitted, 3),
        "copies_offered_accepted_by_depth": {
            source: [[int(a), int(b)] for a, b in depths]
            for source, depths in copies_of(run, arm, category).items()
        },
    }


def lookup_us(lookups: int) -> float:
    """CPU time of a look-up that finds seven tokens in a full ring, in microseconds."""
    rng = random.Random(1)
    ring, tokens = HistoryRing(), [rng.randrange(1 << 17) for _ in range(2 * RING_TOKENS)]
    Response(ring, "").write(tokens)
    places = [rng.randrange(RING_TOKENS + 8, len(tokens) - 8) for _ in range(lookups)]
    texts = [tokens[at - 8 : at] for at in places]
    started_s = time.thread_time()
    for text in texts:
        if ring.find("", window_of(text)) is None:
            raise BenchmarkFailure("the ring lost a text that it holds")
    return (time.thread_time() - started_s) / lookups * 1e6


def state_bytes_ratio() -> float:
    """Bytes of a saved column of the recurrence over those of a record, of all layers at the
    released sizes."""
    released = read_geometry(published_config())

    def saved(kind: str, geometry: Geometry) -> int:
        groups = state_spec(geometry, 1).groups
        return sum(math.prod(group.shape) for group in groups if group.kind == kind)

    return saved("column", replace(released, recurrence="columns")) / saved("record", released)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help="another one; prints, writes no result")
    parser.add_argument("--small", action="store_true", help="smoke run; writes no result")
    options = parser.parse_args(arguments)
    console, size = Console(), SMALL if options.small else OFFICIAL
    checkpoint = options.checkpoint or CHECKPOINT
    try:
        with tempfile.TemporaryDirectory(prefix="flare-history-") as folder:
            edits, others = (
                run_part(part, size, checkpoint, Path(folder) / part.name, console)
                for part in size.parts
            )
            metrics = history_metrics(edits, others)
            metrics["lookup_us"] = round(lookup_us(size.lookups), 2)
            metrics["state_bytes_ratio"] = round(state_bytes_ratio(), 1)
    except BenchmarkFailure as failure:
        print(f"history failed: {failure}", file=sys.stderr)
        return 2
    official = not (options.small or options.checkpoint)
    return conclude(RESULT, metrics, BOUNDS, console, official=official)


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m benchmarks.workload.run``: what speculation is worth, on the frozen workload.

Engines of this process, one an arm, take turns on the same few conversations (contract: B2): no
drafter, every fixed depth from zero, adaptive, adaptive with predicted edits offered as copies, and
adaptive with history drafts. Sampling is the checkpoint's default, drawn by position (contract:
S8): every arm writes the same tokens, so pairs differ in time alone, and a difference in work is a
fault that the result counts. Then the service is compared with a minimal replay of its rounds
(contract: C7). Estimated at six to seven minutes on two quiet cores.

Writes `workload.json`, and beside it the report, `workload.md` and `workload.html`; with `--greedy`
the same at temperature 0 as `workload_greedy`. Observations go to `--out`, where an interrupted run
goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from benchmarks.serving.alone import call_alone
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.support.results import RESULTS, conclude, running_command
from benchmarks.workload.arms import ADAPTIVE, ARMS, CHECKPOINT, ENGINE, started
from benchmarks.workload.metrics import BOUNDS, workload_metrics
from benchmarks.workload.replay import Replayed, ReplayJob, measure_replay
from flare_ray.workload.arrivals import parse_arrivals
from flare_ray.workload.environment import describe
from flare_ray.workload.items import CATEGORIES
from flare_ray.workload.records import Header, Journal
from flare_ray.workload.report import write_report
from flare_ray.workload.runner import Runner, RunSettings
from flare_ray.workload.source import load_workload
from flare_ray.workload.summary import Run, read_run
from flare_ray.workload.tokens import Encoder, synthetic_ids

RESULT = "workload"
REPLAY_LIMIT_S = 300.0
REPLAY_LANES = (1, 4)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        settings: of the requests.
        replay_requests: a batch of lanes more is run first and not counted.
        replay_tokens: output of each.
        engine: settings of every engine besides its speculation.
    """

    settings: RunSettings
    arms: tuple[str, ...]
    replay_requests: int
    replay_tokens: int
    engine: dict[str, Any] = field(default_factory=lambda: ENGINE)


OFFICIAL = Size(
    settings=RunSettings(
        categories=CATEGORIES,
        arrivals=parse_arrivals("closed:1"),
        sessions=3,
        # A program's first two runs record it and are slow: adaptive arms meet their widths here.
        warm=2,
        repeats=2,
        chunk=3,
        reproducible=True,
        salted=True,
    ),
    arms=ARMS,
    replay_requests=8,
    replay_tokens=128,
)
SMALL = Size(
    settings=msgspec.structs.replace(
        OFFICIAL.settings,
        categories=("tool_json", "chat"),
        sessions=2,
        repeats=1,
        max_tokens=24,
    ),
    arms=("off", "fixed-0", "fixed-5", "adaptive", "adaptive-history"),
    replay_requests=2,
    replay_tokens=16,
)


def run_arms(size: Size, checkpoint: Path, out: Path, console: Console) -> Run:
    """Run every arm on every block into the folder `out`, and read it back."""
    encoder = Encoder(checkpoint)
    workload = load_workload(encoder=encoder)
    header = Header(
        workload=workload.name,
        digest=workload.digest,
        arms=size.arms,
        settings=msgspec.to_builtins(size.settings),
        environment=describe(running_command()),
    )
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(out, header))
        running = stack.enter_context(started(size.arms, checkpoint, engine=size.engine))
        for refused in running.refused:
            journal.write(refused)
            console.print(f"{refused.arm} did not start: {refused.refused}", markup=False)
        bar = stack.enter_context(Progress(*columns, console=console))
        task = bar.add_task("blocks")

        def on_block(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        runner = Runner(journal, size.settings, tokens=workload.tokens, on_block=on_block)
        runner.run(running.arms, workload.items)
    return read_run(out)


def run_replays(size: Size, checkpoint: Path) -> dict[str, Replayed]:
    """Service against replay with adaptive drafts, on the synthetic corpus."""
    encode = Encoder(checkpoint).codec.encode_prompt
    found = {}
    for lanes in REPLAY_LANES:
        count = size.replay_requests + lanes
        job = ReplayJob(
            prompts=[synthetic_ids(encode, 64, seed=seed) for seed in range(count)],
            lanes=lanes,
            max_tokens=size.replay_tokens,
            arm=ADAPTIVE,
            checkpoint=checkpoint,
            engine=size.engine,
        )
        found[f"b{lanes}"] = call_alone(measure_replay, job, limit_s=REPLAY_LIMIT_S)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workload.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help="another one; prints, writes no result")
    parser.add_argument("--out", type=Path, help="folder of the observations; goes on there")
    parser.add_argument("--small", action="store_true", help="smoke run; writes no result")
    parser.add_argument(
        "--greedy", action="store_true", help="temperature 0, a result and report of its own"
    )
    parser.add_argument("--report", type=Path, help="folder of the report of an unofficial run")
    options = parser.parse_args(arguments)
    console, size = Console(), SMALL if options.small else OFFICIAL
    if options.greedy:
        size = replace(size, settings=msgspec.structs.replace(size.settings, temperature=0.0))
    name = f"{RESULT}_greedy" if options.greedy else RESULT
    official = not (options.small or options.checkpoint)
    checkpoint = options.checkpoint or CHECKPOINT
    try:
        with tempfile.TemporaryDirectory(prefix="flare-workload-") as folder:
            out = options.out or Path(folder)
            run = run_arms(size, checkpoint, out, console)
            metrics = workload_metrics(run, run_replays(size, checkpoint))
    except BenchmarkFailure as failure:
        print(f"workload failed: {failure}", file=sys.stderr)
        return 2
    reports = RESULTS if official else options.report
    if reports is not None:
        for path in write_report([run], reports):
            path.rename(path.with_stem(name))
    return conclude(name, metrics, BOUNDS, console, official=official)


if __name__ == "__main__":
    raise SystemExit(main())

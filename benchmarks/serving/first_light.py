"""``python -m benchmarks.serving.first_light``: speed, memory and start of the whole service.

One run, one checkpoint, one machine; about twelve minutes on two quiet cores. Arms never overlap:

    1. service, adaptive drafts   start-up, mixed set at 1 and 4 lanes, time to first token
    2. service, no drafts         the same prompts and seeds, twice
    3. transformers `generate`    the same prompts, one and two threads; the faster counts
    4. service, adaptive drafts   the mixed set again, so that this arm surrounds the other two
    5. engine, five drafts fixed  mean emitted tokens by category, sampled and greedy

Each service arm first meets other prompts of every category, so that neither pays for first use;
the adaptive policy keeps what it learns from one pass to the next, as in a running service.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.serving.acceptance import Acceptance, AcceptanceJob, measure_acceptance
from benchmarks.serving.alone import call_alone
from benchmarks.serving.arms import TTFT_PROMPT_TOKENS, ServiceArm, Workload, visit
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.peer import PeerJob, PeerResult, run_peer
from benchmarks.serving.report import BOUNDS, FirstLight, first_light_metrics, print_tables
from benchmarks.serving.service import Target, leave_on_terminate, open_target
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts, mixed
from benchmarks.support.results import print_result, write_result

RESULT = "first_light"
DEPTH = 5
PEER_LIMIT_S = 900.0
ACCEPTANCE_LIMIT_S = 600.0
IDLE_CATEGORIES = ("docs", "code")
NO_DRAFTS = ("--mtp-draft-tokens", "0")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        per_category: measured prompts of each category.
        max_tokens: longest answer.
        repeats: passes of the arm without drafts; the adaptive one makes as many over two starts.
        peer_trial: prompts of each category that both thread counts of the peer run.
        acceptance_per_category / greedy_per_category: prompts of the fixed-depth tables.
        idle_requests: time-to-first-token measurements.
    """

    per_category: int
    max_tokens: int
    repeats: int
    peer_trial: int
    acceptance_per_category: int
    greedy_per_category: int
    idle_requests: int


FULL = Size(
    per_category=4,
    max_tokens=96,
    repeats=2,
    peer_trial=1,
    acceptance_per_category=16,
    greedy_per_category=8,
    idle_requests=15,
)
QUICK = Size(
    per_category=1,
    max_tokens=32,
    repeats=2,
    peer_trial=1,
    acceptance_per_category=2,
    greedy_per_category=1,
    idle_requests=3,
)


class Progress:
    """Lines with the time since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        self._console.print(f"[{minutes:2d}:{seconds:02d}] {text}", markup=False, highlight=False)


def make_workload(prompts: Mapping[str, Sequence[Prompt]], size: Size) -> Workload:
    """Prompts of the service arms; what warms up is not measured.

    Raises:
        BenchmarkFailure: the file has too few.
    """
    long_enough = [
        replace(prompt, ids=prompt.ids[:TTFT_PROMPT_TOKENS], seed=prompt.place)
        for category in IDLE_CATEGORIES
        for prompt in prompts[category]
        if len(prompt.ids) >= TTFT_PROMPT_TOKENS
    ]
    if len(long_enough) < size.idle_requests:
        raise BenchmarkFailure(
            f"{size.idle_requests} prompts of {TTFT_PROMPT_TOKENS} tokens are needed among "
            f"{', '.join(IDLE_CATEGORIES)}, the file has {len(long_enough)}"
        )
    return Workload(
        measured=tuple(mixed(prompts, size.per_category)),
        warm=tuple(mixed(prompts, 1, skip=size.per_category)),
        idle=tuple(long_enough[: size.idle_requests]),
        max_tokens=size.max_tokens,
    )


def run(
    target: Target, prompts: Mapping[str, Sequence[Prompt]], size: Size, say: Progress
) -> FirstLight:
    """All arms, in the order of this module's first lines."""
    work = make_workload(prompts, size)
    adaptive, off = ServiceArm("adaptive drafts", ()), ServiceArm("no drafts", NO_DRAFTS)
    half = size.repeats // 2
    visit(adaptive, target, work, repeats=half, say=say, first_tokens=True)
    visit(off, target, work, repeats=size.repeats, say=say)
    peer = _peer(target, work, size, say)
    visit(adaptive, target, work, repeats=size.repeats - half, say=say)
    sampled = _acceptance(target, prompts, size, say, greedy=False)
    greedy = _acceptance(target, prompts, size, say, greedy=True)
    engine = target.engine
    return FirstLight(
        adaptive=adaptive,
        off=off,
        peer=peer,
        sampled=sampled,
        greedy=greedy,
        settings={
            "checkpoint": Path(engine["checkpoint"]).name,
            "dtype": engine["dtype"],
            "threads_per_rank": engine["threads_per_rank"],
            "concurrency": engine["concurrency"],
            **asdict(size),
        },
    )


def _peer(target: Target, work: Workload, size: Size, say: Progress) -> PeerResult:
    trial = tuple(prompt for prompt in work.measured if prompt.place < size.peer_trial)
    rest = tuple(prompt for prompt in work.measured if prompt.place >= size.peer_trial)
    job = PeerJob(target.checkpoint, trial, rest, work.max_tokens)
    say(f"transformers: {len(trial)} prompts at each thread count, {len(rest)} at the faster one")
    peer = call_alone(run_peer, job, limit_s=PEER_LIMIT_S)
    say(f"transformers: {peer.tokens_per_s(peer.threads):.1f} tokens/s, {peer.threads} thread(s)")
    return peer


def _acceptance(
    target: Target,
    prompts: Mapping[str, Sequence[Prompt]],
    size: Size,
    say: Progress,
    *,
    greedy: bool,
) -> dict[str, Acceptance]:
    count = size.greedy_per_category if greedy else size.acceptance_per_category
    chosen: dict[str, list[Prompt]] = {category: [] for category in prompts}
    for prompt in mixed(prompts, count):
        chosen[prompt.category].append(prompt)
    job = AcceptanceJob(
        engine=target.engine,
        checkpoint=target.checkpoint,
        prompts=chosen,
        depth=DEPTH,
        max_tokens=size.max_tokens,
        temperature=0.0 if greedy else None,
    )
    found = call_alone(measure_acceptance, job, limit_s=ACCEPTANCE_LIMIT_S)
    say(f"engine, {DEPTH} drafts fixed, {'greedy' if greedy else 'sampled'}: {count} a category")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.first_light",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="another checkpoint; prints, writes nothing"
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, JSON lines")
    parser.add_argument("--threads", type=int, help="threads a rank; prints, writes nothing")
    parser.add_argument("--port", type=int, help="another port than the deployment's")
    parser.add_argument("--quick", action="store_true", help="smoke run; prints, writes nothing")
    options = parser.parse_args(arguments)
    leave_on_terminate()
    console = Console()
    try:
        with open_target(
            checkpoint=options.checkpoint, port=options.port, threads=options.threads
        ) as target:
            prompts = load_prompts(options.prompts, target.checkpoint)
            found = run(target, prompts, QUICK if options.quick else FULL, Progress(console))
    except BenchmarkFailure as failure:
        print(f"first_light failed: {failure}", file=sys.stderr)
        return 2
    print_tables(found, console)
    changed = options.quick or options.checkpoint is not None or options.threads is not None
    return _finish(found, console, official=not changed)


def _finish(found: FirstLight, console: Console, *, official: bool) -> int:
    """Print the targets; write the result of an official run. Exit status 1 if one is missed."""
    metrics = first_light_metrics(found)
    if official:
        result = write_result(RESULT, metrics, BOUNDS)
        print_result(result, console)
        return int(not all(target.met for target in result.targets))
    for bound in BOUNDS:
        measured = metrics[bound.metric]
        state = "met" if bound.is_met_by(metrics) else "missed"
        console.print(f"{bound.metric}: {measured:.4g} {bound.operator} {bound.value:g} {state}")
    console.print("not an official run: no result was written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m benchmarks.workload.overheads``: replay, native service, complete service
(contract: B5, C7).

The same prompts of the synthetic corpus, without drafts and with adaptive ones, at one and at four
requests: a minimal replay of the service's own rounds, `submit()` in the same process, and
`flare-ray serve` with HTTP and Ray in front. The first two take turns; the third runs by itself, so
its ratio holds only on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.alone import call_alone
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.service import Target, leave_on_terminate, open_target, serving
from benchmarks.support.results import Bound, conclude
from benchmarks.workload.arms import ADAPTIVE, OFF
from benchmarks.workload.metrics import replay_figures
from benchmarks.workload.replay import ReplayJob, measure_replay
from flare_ray.workload.endpoints import EndpointError, Request
from flare_ray.workload.http import HttpEndpoint
from flare_ray.workload.tokens import Encoder, synthetic_ids, synthetic_item

RESULT = "overheads"
BOUNDS = (Bound(metric="service_vs_replay_max", operator="<=", value=1.10),)
LIMIT_S = 300.0
LANES = (1, 4)
REQUESTS, TOKENS, PROMPT_TOKENS = 8, 128, 64
OPTIONS: dict[str, tuple[str, ...]] = {OFF: ("--mtp-draft-tokens", "0"), ADAPTIVE: ()}


def jobs_of(checkpoint: Path, *, requests: int, tokens: int) -> list[ReplayJob]:
    """Every arm at every number of lanes; a batch more is run first and not counted."""
    encode = Encoder(checkpoint).codec.encode_prompt
    return [
        ReplayJob(
            prompts=[
                synthetic_ids(encode, PROMPT_TOKENS, seed=seed) for seed in range(requests + lanes)
            ],
            lanes=lanes,
            max_tokens=tokens,
            arm=arm,
            checkpoint=checkpoint,
        )
        for arm in OPTIONS
        for lanes in LANES
    ]


def over_http(target: Target, jobs: Sequence[ReplayJob]) -> dict[tuple[str, int], float]:
    """Seconds a token of the complete service, by arm and lanes.

    Raises:
        BenchmarkFailure: a request failed.
    """
    found = {}
    for arm, options in OPTIONS.items():
        with serving(target, options) as service:
            endpoint = HttpEndpoint(service.base_url)
            for job in jobs:
                if job.arm == arm:
                    found[arm, job.lanes] = _seconds_a_token(endpoint, job)
            endpoint.close()
    return found


def _seconds_a_token(endpoint: HttpEndpoint, job: ReplayJob) -> float:
    batches = [job.prompts[i : i + job.lanes] for i in range(0, len(job.prompts), job.lanes)]
    spent_s = 0.0
    tokens = 0
    with ThreadPoolExecutor(job.lanes) as pool:
        for number, batch in enumerate(batches):
            started_s = time.perf_counter()
            try:
                replies = list(pool.map(endpoint.ask, [_request(ids, job) for ids in batch]))
            except EndpointError as error:
                raise BenchmarkFailure(f"{job.arm}, {job.lanes} lanes: {error}") from error
            if number:
                spent_s += max(reply.ended_s for reply in replies) - started_s
                tokens += sum(reply.completion_tokens for reply in replies)
    return spent_s / tokens


def _request(ids: tuple[int, ...], job: ReplayJob) -> Request:
    item = synthetic_item(f"list-{len(ids)}", seed=len(ids), max_tokens=job.max_tokens)
    return Request(item=item, ids=ids, max_tokens=job.max_tokens, ignore_eos=True)


def measure(target: Target, *, requests: int, tokens: int) -> dict[str, JsonValue]:
    """All figures."""
    jobs = jobs_of(target.checkpoint, requests=requests, tokens=tokens)
    replays = {
        (job.arm, job.lanes): call_alone(measure_replay, job, limit_s=LIMIT_S) for job in jobs
    }
    complete = over_http(target, jobs)
    table: dict[str, JsonValue] = {}
    for (arm, lanes), one in replays.items():
        replay_s = one.replay_s / one.tokens
        table[f"{arm}_b{lanes}"] = {
            **replay_figures(one),
            "complete_vs_replay": complete[arm, lanes] / replay_s,
            "complete_ms_per_token": complete[arm, lanes] * 1e3,
        }
    return {
        "service_vs_replay_max": max(one.ratio for one in replays.values()),
        "service_vs_replay_cpu_max": max(one.cpu_ratio for one in replays.values()),
        "arms": table,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workload.overheads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, help="another port than the deployment's")
    parser.add_argument("--small", action="store_true", help="smoke run; writes no result")
    options = parser.parse_args(arguments)
    leave_on_terminate()
    requests, tokens = (2, 16) if options.small else (REQUESTS, TOKENS)
    try:
        with open_target(port=options.port) as target:
            metrics = measure(target, requests=requests, tokens=tokens)
    except BenchmarkFailure as failure:
        print(f"overheads failed: {failure}", file=sys.stderr)
        return 2
    return conclude(RESULT, metrics, BOUNDS, Console(), official=not options.small)


if __name__ == "__main__":
    raise SystemExit(main())

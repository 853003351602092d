"""``python -m benchmarks.workload.baselines``: the engine's plain figures (contract: B4).

One engine of this process after the other on the synthetic serving corpus, whose prompts have exact
lengths; no claim about acceptance rests on it (contract: B6). Seconds are by the wall, tokens those
of the prompts or answers:

    start            process start-up of the engine, readiness generation included
    prefill          time to the first token of a cold prompt, by capacity (512, 4,096) and length
    decode           256 tokens a request at 1, 2 and 4 requests, without drafts and adaptive
    tail             first token of 11 tokens behind a kept prefix, beside the cold prompt

Host gaps between rounds are part of `benchmarks.workload.overheads`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from benchmarks.serving.alone import call_alone
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.support.results import conclude
from benchmarks.workload.arms import ADAPTIVE, CHECKPOINT, ENGINE, OFF, engine_settings
from flare_ray.workload.endpoints import EndpointError, Reply, Request
from flare_ray.workload.engine import EngineEndpoint
from flare_ray.workload.stats import tails
from flare_ray.workload.tokens import Encoder, synthetic_ids, synthetic_item

RESULT = "baselines"
LIMIT_S = 550.0


@dataclass(frozen=True, slots=True)
class BaselineJob:
    """What is run.

    Attributes:
        capacities: rows of a prefill program.
        lengths: prompts of the prefill table, tokens; longer than the context is refused.
        tail: tokens of a kept prefix and behind it.
        repeats: cold prompts of each length, and tails.
    """

    checkpoint: Path
    engine: dict[str, Any] = field(default_factory=lambda: ENGINE)
    capacities: tuple[int, ...] = (512, 4096)
    lengths: tuple[int, ...] = (512, 4096)
    decode_lanes: tuple[int, ...] = (1, 2, 4)
    decode_tokens: int = 256
    tail: tuple[int, int] = (4096, 11)
    repeats: int = 3

    @property
    def context_tokens(self) -> int:
        """Room for every prompt and its answer."""
        longest = max(*self.lengths, sum(self.tail))
        return max(longest, 64 + self.decode_tokens) + 64


class Bench:
    """One started engine; `close` ends it."""

    def __init__(self, job: BaselineJob, arm: str, *, prefill: int, cached: bool = False) -> None:
        from flare_ray.actors.inprocess import start_inprocess
        from flare_ray.config import EngineConfig

        settings = engine_settings(arm, job.checkpoint, job.engine) | {
            "prefill_tokens": prefill,
            "context_tokens": job.context_tokens,
            "prefix_cache": {"enabled": cached},
            "grammar": {"enabled": False},
        }
        started_s = time.perf_counter()
        self.core = start_inprocess(EngineConfig.model_validate(settings))
        self.started_s = time.perf_counter() - started_s
        encoder = Encoder(job.checkpoint)
        self.encode: Callable[[str], list[int]] = encoder.codec.encode_prompt
        self._endpoint = EngineEndpoint(self.core, encoder, name=arm)
        self._asked = 0

    def ask(self, ids: tuple[int, ...], max_tokens: int) -> tuple[Reply, float]:
        """The reply, and the moment it was asked for.

        Raises:
            BenchmarkFailure: it failed.
        """
        self._asked += 1
        item = synthetic_item(f"asked-{self._asked}", seed=self._asked, max_tokens=max_tokens)
        request = Request(item=item, ids=ids, max_tokens=max_tokens, ignore_eos=True)
        sent_s = time.perf_counter()
        try:
            return self._endpoint.ask(request), sent_s
        except EndpointError as error:
            raise BenchmarkFailure(f"{len(ids)} tokens: {error}") from error

    def first_s(self, ids: tuple[int, ...]) -> float:
        """Time to the first token."""
        reply, sent_s = self.ask(ids, 2)
        return reply.chunk_s[0] - sent_s

    def close(self) -> None:
        """End the engine."""
        self.core.shutdown(0.0)


@contextmanager
def opened(job: BaselineJob, arm: str, *, prefill: int, cached: bool = False) -> Iterator[Bench]:
    """A bench that ends with the context."""
    bench = Bench(job, arm, prefill=prefill, cached=cached)
    try:
        yield bench
    finally:
        bench.close()


def measure_baselines(job: BaselineJob) -> dict[str, JsonValue]:
    """All tables; call it in a process of its own."""
    from flare_ray.actors.openmp import wait_passively

    wait_passively()
    decode = {arm: _decode(job, arm) for arm in (OFF, ADAPTIVE)}
    return {
        "start": {arm: table.pop("start_s") for arm, table in decode.items()},
        "prefill": {f"rows_{rows}": _prefill(job, rows) for rows in job.capacities},
        "decode": {arm: dict(table) for arm, table in decode.items()},
        "tail": _tail(job),
    }


def _prefill(job: BaselineJob, rows: int) -> dict[str, JsonValue]:
    with opened(job, ADAPTIVE, prefill=rows) as bench:
        bench.first_s(synthetic_ids(bench.encode, min(job.lengths), seed=1))  # first use
        found: dict[str, JsonValue] = {}
        for length in job.lengths:
            prompts = [synthetic_ids(bench.encode, length, seed=s) for s in range(job.repeats)]
            first_s = statistics.median(bench.first_s(ids) for ids in prompts)
            found[f"tokens_{length}"] = {
                "first_token_s": first_s,
                "prompt_tokens_per_s": length / first_s,
            }
    return found


def _decode(job: BaselineJob, arm: str) -> dict[str, JsonValue]:
    with opened(job, arm, prefill=job.engine["prefill_tokens"]) as bench:
        found: dict[str, JsonValue] = {"start_s": bench.started_s}
        for lanes in job.decode_lanes:
            prompts = [synthetic_ids(bench.encode, 64, seed=seed) for seed in range(lanes)]
            _together(bench, prompts, job.decode_tokens)  # first use of these programs
            replies, wall_s = _together(bench, prompts, job.decode_tokens)
            gaps = [
                (later - earlier) * 1e3
                for reply in replies
                for earlier, later in itertools.pairwise(reply.chunk_s)
            ]
            tokens = sum(reply.completion_tokens for reply in replies)
            found[f"lanes_{lanes}"] = {
                "tokens": tokens,
                "tokens_per_s": tokens / wall_s,
                "gap_ms": {name: round(value, 3) for name, value in tails(gaps).items()},
            }
    return found


def _together(
    bench: Bench, prompts: Sequence[tuple[int, ...]], tokens: int
) -> tuple[list[Reply], float]:
    """All prompts at once; the replies, and the time until the last has ended."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        started_s = time.perf_counter()
        found = list(pool.map(lambda ids: bench.ask(ids, tokens)[0], prompts))
    return found, max(reply.ended_s for reply in found) - started_s


def _tail(job: BaselineJob) -> dict[str, JsonValue]:
    """The first request keeps the prefix; the others bring it and a tail of their own."""
    prefix, tail = job.tail
    with opened(job, ADAPTIVE, prefill=job.engine["prefill_tokens"], cached=True) as bench:
        head = synthetic_ids(bench.encode, prefix, seed=1)
        tails_ids = [synthetic_ids(bench.encode, tail, seed=2 + i) for i in range(job.repeats + 2)]
        cold_s = bench.first_s(head + tails_ids[0])
        bench.first_s(head + tails_ids[1])  # keeps the prefix itself, where they part
        warm_s = [bench.first_s(head + ids) for ids in tails_ids[2:]]
        reply, _ = bench.ask(head + tails_ids[0][:-1], 1)
    if reply.cached_tokens < prefix // 2:
        raise BenchmarkFailure(f"only {reply.cached_tokens} of {prefix} tokens were restored")
    warm = statistics.median(warm_s)
    return {"cold_s": cold_s, "warm_s": warm, "warm_vs_cold": warm / cold_s}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workload.baselines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, help="another one; writes no result")
    parser.add_argument(
        "--lengths", help="prompts of the prefill table, e.g. 4096,65536; writes no result"
    )
    options = parser.parse_args(arguments)
    lengths = tuple(map(int, options.lengths.split(","))) if options.lengths else (512, 4096)
    job = BaselineJob(checkpoint=options.checkpoint or CHECKPOINT, lengths=lengths)
    try:
        metrics = call_alone(measure_baselines, job, limit_s=LIMIT_S)
    except BenchmarkFailure as failure:
        print(f"baselines failed: {failure}", file=sys.stderr)
        return 2
    official = options.checkpoint is None and options.lengths is None
    return conclude(RESULT, metrics, (), Console(), official=official)


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m benchmarks.sampling.constrained``: what constrained output costs at full width.

One engine in this process on the demo checkpoint, held-out prompts that ask for JSON, each with the
schema of its expected answer, sampled at the checkpoint's defaults in the plain mode; about five
minutes on two quiet cores, three of them for the reproducible mode's acceptance. Four requests at a
time, the same prompts and seeds in every arm. Arms, in turn and back:

    free        no grammar
    schema      every request has its grammar, drafts at full width
    half        every second request has its grammar
    narrow      every request has its grammar, rounds of width one (another engine)

A lane's rate is its tokens per second from its first token to its last, summed over requests before
dividing; prompts, which cost the same in every arm, are left out. The first pass of each arm is not
counted: it compiles grammars, fills the prefix cache and teaches the policy.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from pydantic import JsonValue
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.sampling import reproducible
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import PROMPTS
from benchmarks.support.results import Bound, print_result, write_result
from flare_ray.actors.core import EngineCore
from flare_ray.actors.inprocess import start_inprocess
from flare_ray.config import EngineConfig
from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.messages import Delta, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.sampling import resolve

CHECKPOINT = reproducible.CHECKPOINT
RESULT = "constrained"
LANES = 4
MAX_TOKENS = 160
LIMIT_S = 300.0
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
BOUNDS = (
    Bound(metric="schema_full_width_vs_unconstrained", operator=">=", value=0.8),
    Bound(metric="schema_full_vs_width_one", operator=">=", value=1.5),
    Bound(metric="free_lanes_in_half_batch", operator=">=", value=0.85),
    Bound(metric="reproducible_acceptance_ratio", operator=">=", value=0.9),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the schema of its expected answer."""

    ids: tuple[int, ...]
    schema: Mapping[str, Any]


@dataclass(slots=True)
class Lane:
    """One request as it went."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def seconds(self) -> float:
        return self.last_s - self.first_s


@dataclass(slots=True)
class Tally:
    """Lanes of an arm over its passes."""

    tokens: int = 0
    seconds: float = 0.0
    finished: int = 0
    valid: int = 0
    rounds: int = 0
    offered: int = 0
    accepted: int = 0

    def add(self, lane: Lane) -> None:
        assert isinstance(lane.end, Finished)
        self.tokens += len(lane.tokens) - 1
        self.seconds += lane.seconds
        self.rounds += lane.end.rounds
        self.offered += lane.end.drafts_offered
        self.accepted += lane.end.drafts_accepted

    @property
    def rate(self) -> float:
        """Tokens per second of one lane."""
        return self.tokens / self.seconds


def schema_of(value: Any) -> dict[str, Any]:
    """The closed schema that a JSON value is an example of."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: schema_of(item) for name, item in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        items = schema_of(value[0]) if value else {}
        return {"type": "array", "items": items, "minItems": 1, "maxItems": max(len(value), 1) + 2}
    if isinstance(value, bool):
        return {"type": "boolean"}
    kinds = {int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": kinds[type(value)]}


def load_tasks(count: int) -> list[Task]:
    """The first `count` prompts whose expected answer is JSON."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tasks = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["category"] != "json":
            continue
        try:
            expected = json.loads(row["expected"]["content"])
        except ValueError:
            continue
        tasks.append(Task(tuple(tokenizer.encode(row["prompt"]).ids), schema_of(expected)))
    if not tasks:
        raise BenchmarkFailure(f"no prompt of {PROMPTS.name} expects JSON")
    return (tasks * -(-count // len(tasks)))[:count]


class Arm:
    """Runs tasks on an engine, LANES at a time."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._numbers = iter(range(1 << 30))

    def run(self, tasks: Sequence[Task], constrained: Sequence[bool], seed: int) -> list[Lane]:
        """Lanes in the order of `tasks`."""
        lanes = [Lane() for _ in tasks]
        slots = threading.Semaphore(LANES)
        for place, task in enumerate(tasks):
            if not slots.acquire(timeout=LIMIT_S):
                raise BenchmarkFailure(f"no request ended within {LIMIT_S:g} s")
            self._start(task, constrained[place], seed + place, (lanes[place], slots))
        for _ in range(LANES):
            if not slots.acquire(timeout=LIMIT_S):
                raise BenchmarkFailure(f"no request ended within {LIMIT_S:g} s")
        failed = [lane.end for lane in lanes if not isinstance(lane.end, Finished)]
        if failed:
            raise BenchmarkFailure(f"a request failed: {failed[0]}")
        return lanes

    def _start(
        self, task: Task, constrained: bool, seed: int, out: tuple[Lane, threading.Semaphore]
    ) -> None:
        lane, slots = out

        def on_item(item: StreamItem) -> None:
            if isinstance(item, Delta):
                now = time.perf_counter()
                lane.first_s = lane.first_s or now
                lane.last_s = now
                lane.tokens += item.tokens
            elif isinstance(item, Finished | Failed):
                lane.end = item
                slots.release()

        manifest = self._core.manifest
        resolved = resolve(
            SamplingParams(seed=seed, max_tokens=MAX_TOKENS, reproducible=False),
            manifest.sampling_defaults,
            vocab_size=manifest.vocab_size,
            prompt_tokens=len(task.ids),
            context_tokens=manifest.context_tokens,
        )
        request = GenerationRequest(
            request_id=f"{seed}-{next(self._numbers)}",
            prompt_tokens=task.ids,
            sampling=resolved.sampling,
            max_tokens=resolved.max_tokens,
            grammar=grammar_of(task) if constrained else None,
        )
        self._core.submit(request, on_item)


def grammar_of(task: Task) -> GrammarSpec:
    """Reasoning, then a document of the task's schema."""
    return GrammarSpec(
        kind="json_schema",
        source=json.dumps(task.schema),
        reasoning="open",
        reasoning_open=THINK_OPEN,
        reasoning_close=THINK_CLOSE,
    )


def engine(**fields: Any) -> EngineCore:
    """The demo's engine."""
    settings = {"concurrency": LANES, "context_tokens": 2048, "threads_per_rank": 1, **fields}
    return start_inprocess(
        EngineConfig(checkpoint=str(CHECKPOINT), device="cpu", dtype="float32", **settings)
    )


def measure(tasks: Sequence[Task], passes: int) -> dict[str, Tally]:
    """Tallies by arm; of `half` and its counterpart `free half` only the free lanes count."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    wide = engine()
    narrow = engine(speculation={"policy": "fixed", "fixed_width": 1})
    half = [place % 2 == 0 for place in range(len(tasks))]
    every, none = [True] * len(tasks), [False] * len(tasks)
    plans = {"free": (wide, none), "schema": (wide, every), "half": (wide, half)}
    plans["narrow"] = (narrow, every)
    tallies = {name: Tally() for name in (*plans, "free half")}
    try:
        for turn in range(passes + 1):
            names = list(plans) if turn % 2 else list(plans)[::-1]
            for name in names:
                core, constrained = plans[name]
                lanes = Arm(core).run(tasks, constrained, 1000 * turn)
                if turn:
                    _count(tallies, name, lanes, (tasks, half, tokenizer))
    finally:
        wide.shutdown(0.0)
        narrow.shutdown(0.0)
    return tallies


def _count(
    tallies: Mapping[str, Tally],
    name: str,
    lanes: Sequence[Lane],
    known: tuple[Sequence[Task], Sequence[bool], Tokenizer],
) -> None:
    tasks, half, tokenizer = known
    for task, lane, in_half in zip(tasks, lanes, half, strict=True):
        if len(lane.tokens) < 2:
            continue
        if name != "half" or not in_half:
            tallies[name].add(lane)
        if name == "free" and not in_half:
            tallies["free half"].add(lane)
        if name in ("schema", "narrow"):
            _check(tallies[name], task, lane, tokenizer)


def _check(tally: Tally, task: Task, lane: Lane, tokenizer: Tokenizer) -> None:
    assert isinstance(lane.end, Finished)
    if lane.end.reason != "stop":
        return
    text = tokenizer.decode(lane.tokens, skip_special_tokens=False)
    answer = text.split(THINK_CLOSE, 1)[-1]
    tally.finished += 1
    try:
        jsonschema.validate(json.loads(answer), task.schema)
        tally.valid += 1
    except (ValueError, jsonschema.ValidationError) as error:
        raise BenchmarkFailure(f"a finished answer does not validate: {answer!r}") from error


def metrics_of(tallies: Mapping[str, Tally]) -> dict[str, JsonValue]:
    """Ratios, and the figures behind them."""
    rates = {name: tally.rate for name, tally in tallies.items()}
    return {
        "schema_full_width_vs_unconstrained": rates["schema"] / rates["free"],
        "schema_full_vs_width_one": rates["schema"] / rates["narrow"],
        "free_lanes_in_half_batch": rates["half"] / rates["free half"],
        "lanes": {
            name.replace(" ", "_"): {
                "tokens_per_s": tally.rate,
                "tokens": tally.tokens,
                "emitted_per_round": tally.tokens / max(tally.rounds, 1),
                "accepted_per_offered": tally.accepted / max(tally.offered, 1),
                "finished": tally.finished,
                "valid": tally.valid,
            }
            for name, tally in tallies.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling.constrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=int, default=24, help="prompts a pass; 24 is official")
    parser.add_argument("--passes", type=int, default=3, help="counted passes; 3 is official")
    options = parser.parse_args(arguments)
    official = (options.tasks, options.passes) == (24, 3)
    console = Console()
    try:
        metrics = metrics_of(measure(load_tasks(options.tasks), options.passes))
        if official:
            pair = reproducible.measure()
            metrics["reproducible_acceptance_ratio"] = pair.ratio
            metrics["reproducible"] = pair.report()
    except BenchmarkFailure as error:
        print(f"constrained failed: {error}", file=sys.stderr)
        return 2
    if official:
        result = write_result(RESULT, metrics, BOUNDS)
        print_result(result, console)
        return int(not all(target.met for target in result.targets))
    console.print_json(json.dumps(metrics))
    console.print("not an official run: no result was written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The policy on the demo checkpoint, live: `python -m benchmarks.policy.live`.

Engines of this process, one an arm: adaptive, every fixed width, and speculation off. Every prompt
goes to each of them, one after the other, in an order that rotates; draws are keyed by position
(contract: S8), so all arms write the same text at the checkpoint's sampling defaults, and a pair
differs only in time. Time is that from the first token to the last, host gaps included.

A second part gives the drafter useless weights: what does drafting cost that never succeeds,
against width one, and against an engine that keeps no drafter state? The difference of these two is
the cost of absorption, which no policy can save.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from benchmarks.policy.record import CHECKPOINT, ENGINE
from benchmarks.policy.report import NAME, merged, print_policy
from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.serving.workload import CATEGORIES, PROMPTS, Prompt, load_prompts
from benchmarks.support.results import RESULTS, write_result
from flare_ray.contracts.messages import Delta, Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.sampling import resolve

if TYPE_CHECKING:
    from flare_ray.actors.core import EngineCore

WIDTHS = (1, 2, 3, 4, 5, 6)
DRAFTS = WIDTHS[-1] - 1
ADAPTIVE, OFF = "adaptive", "off"
REQUEST_LIMIT_S = 60.0
RESAMPLES = 1000
WARM_PROMPTS = 2
"""Uncounted prompts a category: a program is recorded when it runs for the second time, and the
adaptive arm has six times as many of them as a fixed one."""
_FIRST_SEED = 5000


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer: tokens after the first one, and the time they took.

    Attributes:
        cpu_s: CPU time of the whole process, which other load on the machine does not stretch.
    """

    tokens: int
    wall_s: float
    cpu_s: float


class Arm:
    """One engine; use `close`."""

    def __init__(self, name: str, speculation: dict[str, Any], checkpoint: Path) -> None:
        from flare_ray.actors.inprocess import start_inprocess
        from flare_ray.config import EngineConfig

        self.name = name
        settings = {
            **ENGINE,
            "checkpoint": str(checkpoint),
            "concurrency": 1,
            "speculation": speculation,
            "prefix_cache": {"enabled": False},
        }
        self._core: EngineCore = start_inprocess(EngineConfig.model_validate(settings))
        self._runs = 0

    def answer(self, prompt: Prompt, max_tokens: int) -> Timing:
        """Run one prompt alone.

        Raises:
            BenchmarkFailure: it failed, or did not end in time.
        """
        self._runs += 1
        ended = threading.Event()
        marks: list[tuple[float, float]] = []
        ends: list[Finished | Failed] = []

        def note(item: StreamItem) -> None:
            if isinstance(item, Delta) and not marks:
                marks.append((time.perf_counter(), time.process_time()))
            if isinstance(item, Finished | Failed):
                marks.append((time.perf_counter(), time.process_time()))
                ends.append(item)
                ended.set()

        self._core.submit(self._request(prompt, max_tokens), note)
        if not ended.wait(REQUEST_LIMIT_S):
            raise BenchmarkFailure(f"{self.name}: no end within {REQUEST_LIMIT_S:.0f} s")
        if isinstance(ends[0], Failed):
            raise BenchmarkFailure(f"{self.name}: {ends[0].message}")
        (begin_wall, begin_cpu), (end_wall, end_cpu) = marks[0], marks[-1]
        tokens = ends[0].completion_tokens - 1
        return Timing(tokens, end_wall - begin_wall, end_cpu - begin_cpu)

    def close(self) -> None:
        """End the engine."""
        self._core.shutdown(0.0)

    def _request(self, prompt: Prompt, max_tokens: int) -> GenerationRequest:
        manifest = self._core.manifest
        resolved = resolve(
            SamplingParams(
                seed=prompt.seed, max_tokens=max_tokens, ignore_eos=True, reproducible=True
            ),
            manifest.sampling_defaults,
            vocab_size=manifest.vocab_size,
            prompt_tokens=len(prompt.ids),
            context_tokens=manifest.context_tokens,
        )
        return GenerationRequest(
            request_id=f"{prompt.category}-{prompt.place}-{self._runs}",
            prompt_tokens=prompt.ids,
            sampling=resolved.sampling,
            max_tokens=resolved.max_tokens,
            ignore_eos=True,
        )


def speculation_of(name: str) -> dict[str, Any]:
    """Settings of an arm: adaptive, off, or a fixed width's number."""
    if name == OFF:
        return {"families": "ordinary"}
    if name == ADAPTIVE:
        return {"draft_tokens": DRAFTS, "policy": "adaptive"}
    return {"draft_tokens": DRAFTS, "policy": "fixed", "fixed_width": int(name)}


def measure(
    names: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    warm: Sequence[Prompt],
    max_tokens: int,
    checkpoint: Path = CHECKPOINT,
) -> dict[str, list[Timing]]:
    """Every prompt on every arm, arms taking turns in a rotating order; timings in the prompts'
    order."""
    arms = [Arm(name, speculation_of(name), checkpoint) for name in names]
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    try:
        for prompt in warm:
            for arm in arms:
                arm.answer(prompt, max_tokens)
        for number, prompt in enumerate(prompts):
            turn = number % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                timings[arm.name].append(arm.answer(prompt, max_tokens))
    finally:
        for arm in arms:
            arm.close()
    return timings


def seconds_per_token(timings: Sequence[Timing], clock: str) -> float:
    """Over all answers together; clock "wall" or "cpu"."""
    spent = sum(t.wall_s if clock == "wall" else t.cpu_s for t in timings)
    return spent / sum(t.tokens for t in timings)


@dataclass(frozen=True, slots=True)
class Compared:
    """Speed of the adaptive arm over that of the best fixed width of a category.

    Attributes:
        lower: 2.5 % quantile of the ratio over resampled prompts, the best width held.
    """

    ratio: float
    lower: float
    best: str
    ms_per_token: dict[str, float]


def compare(timings: Mapping[str, Sequence[Timing]], clock: str) -> Compared:
    """Adaptive against the best fixed width in hindsight."""
    cost = {name: seconds_per_token(found, clock) for name, found in timings.items()}
    best = min((name for name in cost if name not in (ADAPTIVE, OFF)), key=cost.__getitem__)
    ours, theirs = timings[ADAPTIVE], timings[best]
    rng = random.Random(1)
    ratios = []
    for _ in range(RESAMPLES):
        places = rng.choices(range(len(ours)), k=len(ours))
        drawn = [seconds_per_token([arm[i] for i in places], clock) for arm in (theirs, ours)]
        ratios.append(drawn[0] / drawn[1])
    ratios.sort()
    return Compared(
        ratio=cost[best] / cost[ADAPTIVE],
        lower=ratios[RESAMPLES // 40],
        best=best,
        ms_per_token={name: round(1e3 * value, 4) for name, value in cost.items()},
    )


def useless_checkpoint(folder: Path) -> Path:
    """A copy of the demo whose drafter proposes noise: its input projection is shuffled."""
    from safetensors.torch import load_file, save_file

    target = folder / "useless"
    target.mkdir()
    for path in CHECKPOINT.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    names = [name for name in tensors if name.endswith("eh_proj.weight")]
    if not names:
        raise BenchmarkFailure("the checkpoint has no drafter projection (eh_proj.weight)")
    for name in names:
        tensors[name] = tensors[name].flip(0).roll(17, 1).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def live_metrics(
    by_category: Mapping[str, Mapping[str, Sequence[Timing]]],
    useless: Mapping[str, Sequence[Timing]],
) -> dict[str, JsonValue]:
    """Figures of both parts; targets bound those of the wall clock."""
    metrics: dict[str, JsonValue] = {}
    for clock, suffix in (("wall", ""), ("cpu", "_cpu")):
        compared = {name: compare(timings, clock) for name, timings in by_category.items()}
        cost = {name: seconds_per_token(found, clock) for name, found in useless.items()}
        metrics |= {
            f"live_vs_best_fixed_min{suffix}": min(c.ratio for c in compared.values()),
            f"live_vs_best_fixed_lower_min{suffix}": min(c.lower for c in compared.values()),
            f"live_useless_vs_width_one{suffix}": cost[ADAPTIVE] / cost["1"],
            f"live_useless_vs_off{suffix}": cost[ADAPTIVE] / cost[OFF],
            f"live_absorption{suffix}": cost["1"] / cost[OFF],
            f"live_categories{suffix}": {
                name: {
                    "ratio": round(c.ratio, 4),
                    "lower": round(c.lower, 4),
                    "best_width": c.best,
                    "ms_per_token": dict(c.ms_per_token),
                }
                for name, c in compared.items()
            },
        }
    return metrics


def run(
    categories: Sequence[str], per_category: int, max_tokens: int, widths: Sequence[int] = WIDTHS
) -> dict[str, JsonValue]:
    """Both parts."""
    loaded = load_prompts(PROMPTS, CHECKPOINT)
    names = [ADAPTIVE, *map(str, widths), OFF]
    chosen = [
        replace(prompt, seed=_FIRST_SEED + place)
        for place, prompt in enumerate(p for c in categories for p in loaded[c][:per_category])
    ]
    warm = [
        replace(prompt, seed=_FIRST_SEED - 1)
        for c in categories
        for prompt in loaded[c][per_category : per_category + WARM_PROMPTS]
    ]
    timings = measure(names, chosen, warm=warm, max_tokens=max_tokens)
    by_category = {
        category: {
            name: [t for t, p in zip(found, chosen, strict=True) if p.category == category]
            for name, found in timings.items()
        }
        for category in categories
    }
    with tempfile.TemporaryDirectory() as folder:
        useless = measure(
            [ADAPTIVE, "1", OFF],
            chosen,
            warm=warm,
            max_tokens=max_tokens,
            checkpoint=useless_checkpoint(Path(folder)),
        )
    return live_metrics(by_category, useless)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--categories", default=",".join(CATEGORIES))
    parser.add_argument("--per-category", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULTS, help="Folder of the result.")
    options = parser.parse_args(arguments)
    metrics = run(options.categories.split(","), options.per_category, options.max_tokens)
    everything, bounds = merged(metrics, folder=options.out)
    print_policy(write_result(NAME, everything, bounds, folder=options.out))


if __name__ == "__main__":
    main()

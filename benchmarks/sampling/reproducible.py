"""How many drafts the reproducible mode accepts of those that the plain mode does (contract: S8).

    python -m benchmarks.sampling.reproducible

Both modes answer the same held-out prompts of the ten categories with the same seeds, several for
each prompt, at the checkpoint's sampling defaults, every round with as many drafts. Acceptance does
not depend on time, so a busy machine may measure it. It does depend on the texts, which differ
between the modes: over 160 answers the ratio's 95 % interval is 0.13 wide, hence the seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.acceptance import Acceptance, AcceptanceJob, measure_acceptance
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts, mixed
from benchmarks.support.results import ROOT

CHECKPOINT = ROOT / "deployments" / "demo" / "glm"
PROMPTS_PER_CATEGORY = 16
SEEDS = 3
SEED_STRIDE = 100_003
MAX_TOKENS = 128
DEPTH = 5
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "concurrency": 4,
    "context_tokens": 4096,
    "prefill_tokens": 512,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both modes on the same prompts, by category.

    Attributes:
        cpu_s: processor time of each mode's run, prompts and start included.
    """

    plain: dict[str, Acceptance]
    reproducible: dict[str, Acceptance]
    cpu_s: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Accepted drafts a round, reproducible over plain."""
        return _per_round(self.reproducible.values()) / _per_round(self.plain.values())

    def report(self) -> dict[str, Any]:
        """The ratio, accepted drafts a round and CPU seconds: plain first, then reproducible."""
        return {
            "ratio": self.ratio,
            "accepted_per_round": [
                _per_round(self.plain.values()),
                _per_round(self.reproducible.values()),
            ],
            "by_category": {
                name: [_per_round([self.plain[name]]), _per_round([self.reproducible[name]])]
                for name in self.plain
            },
            "cpu_s": list(self.cpu_s),
        }


def measure(
    checkpoint: Path = CHECKPOINT,
    *,
    per_category: int = PROMPTS_PER_CATEGORY,
    max_tokens: int = MAX_TOKENS,
    temperature: float | None = None,
) -> Pair:
    """Run both modes in this process.

    Args:
        temperature: without filters; None = the checkpoint's sampling defaults.
    Raises:
        BenchmarkFailure: prompts are missing, or a request failed.
    """
    prompts: dict[str, list[Prompt]] = {}
    for prompt in mixed(load_prompts(PROMPTS, checkpoint), per_category):
        prompts.setdefault(prompt.category, []).append(prompt)
    return measure_pair(
        AcceptanceJob(
            engine=ENGINE,
            checkpoint=checkpoint,
            prompts={name: with_seeds(found, SEEDS) for name, found in prompts.items()},
            depth=DEPTH,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=None if temperature is None else 1.0,
        )
    )


def with_seeds(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Every prompt with `count` seeds, at places of their own."""
    return [
        replace(prompt, seed=prompt.seed + turn * SEED_STRIDE, place=turn * len(prompts) + place)
        for turn in range(count)
        for place, prompt in enumerate(prompts)
    ]


def measure_pair(job: AcceptanceJob) -> Pair:
    """One setting in both modes."""
    times = [time.process_time()]
    found = []
    for mode in (False, True):
        found.append(measure_acceptance(replace(job, reproducible=mode)))
        times.append(time.process_time())
    return Pair(found[0], found[1], (times[1] - times[0], times[2] - times[1]))


def _per_round(parts: Iterable[Acceptance]) -> float:
    accepted = rounds = 0
    for part in parts:
        accepted += part.accepted
        rounds += part.rounds
    return accepted / rounds


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--prompts-per-category", type=int, default=PROMPTS_PER_CATEGORY)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--temperature", type=float, help="without filters; default: checkpoint's")
    options = parser.parse_args()
    pair = measure(
        options.checkpoint.resolve(),
        per_category=options.prompts_per_category,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )
    print(json.dumps(pair.report(), indent=1))


if __name__ == "__main__":
    main()

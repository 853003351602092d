"""How many drafts the reproducible mode accepts of those that the plain mode does (contract: S8).

    python -m benchmarks.sampling.reproducible

Both modes answer the same held-out prompts of the ten categories with the same seeds, at the
checkpoint's sampling defaults and at temperature 1 without filters, every round with as many
drafts. Acceptance does not depend on time, so a busy machine may measure it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.acceptance import Acceptance, AcceptanceJob, measure_acceptance
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts, mixed
from benchmarks.support.results import ROOT

CHECKPOINT = ROOT / "deployments" / "demo" / "glm"
PROMPTS_PER_CATEGORY = 16
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

    def by_category(self) -> dict[str, tuple[float, float]]:
        """Accepted drafts a round, plain and reproducible."""
        return {
            name: (_per_round([self.plain[name]]), _per_round([self.reproducible[name]]))
            for name in self.plain
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """defaults: at the checkpoint's sampling defaults; unfiltered: at temperature 1."""

    defaults: Pair
    unfiltered: Pair

    @property
    def reproducible_acceptance_ratio(self) -> float:
        """The figure that the contract bounds: at the checkpoint's own sampling defaults."""
        return self.defaults.ratio


def measure(
    checkpoint: Path = CHECKPOINT,
    *,
    per_category: int = PROMPTS_PER_CATEGORY,
    max_tokens: int = MAX_TOKENS,
) -> Measured:
    """Run all four arms in this process.

    Raises:
        BenchmarkFailure: prompts are missing, or a request failed.
    """
    prompts: dict[str, list[Prompt]] = {}
    for prompt in mixed(load_prompts(PROMPTS, checkpoint), per_category):
        prompts.setdefault(prompt.category, []).append(prompt)
    job = AcceptanceJob(
        engine=ENGINE,
        checkpoint=checkpoint,
        prompts=prompts,
        depth=DEPTH,
        max_tokens=max_tokens,
        temperature=None,
    )
    return Measured(measure_pair(job), measure_pair(replace(job, temperature=1.0, top_p=1.0)))


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
    options = parser.parse_args()
    found = measure(
        options.checkpoint.resolve(),
        per_category=options.prompts_per_category,
        max_tokens=options.max_tokens,
    )
    report: dict[str, Any] = {"reproducible_acceptance_ratio": found.reproducible_acceptance_ratio}
    for name, pair in (("defaults", found.defaults), ("temperature_1", found.unfiltered)):
        report[name] = {
            "ratio": pair.ratio,
            "accepted_per_round": (
                _per_round(pair.plain.values()),
                _per_round(pair.reproducible.values()),
            ),
            "cpu_s": pair.cpu_s,
            "by_category": pair.by_category(),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

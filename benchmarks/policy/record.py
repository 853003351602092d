"""Records what the simulator replays: `python -m benchmarks.policy.record`.

1. Acceptance: the demo checkpoint answers its held-out prompts with seven drafts a round. Kept per
   request: the accepted drafts of each round, one digit a round.
2. Cost: complete rounds of every width, host gap included, at one to eight lanes.

Both come from the engine's own decision log. The file is small and committed; acceptance depends on
the checkpoint alone, cost on the machine. Each part names the commit and the machine that it comes
from: the acceptance at the top level, the costs under `costs`; `--costs-only` replaces the latter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.policy.traces import RECORDED
from benchmarks.serving.acceptance import AcceptanceJob, run_requests
from benchmarks.serving.workload import PROMPTS, Prompt, load_prompts
from benchmarks.support.results import ROOT, current_commit, describe_machine
from flare_ray.controller.verification.log import Observed, read_log

CHECKPOINT = ROOT / "deployments" / "demo" / "glm"
DRAFTS = 7
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "context_tokens": 1024,
    "prefill_tokens": 512,
    "threads_per_rank": 1,
}
LANES = (1, 2, 4, 8)
COST_TOKENS = 64
"""Output of a request whose rounds are timed."""
_FIRST_SEED = 9000


def observed_rounds(
    speculation: dict[str, Any], prompts: Sequence[Prompt], *, lanes: int, max_tokens: int
) -> list[Observed]:
    """Rounds of an engine in this process that answers `prompts`, `lanes` at a time."""
    from flare_ray.actors.inprocess import start_inprocess
    from flare_ray.config import EngineConfig

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        settings = {
            **ENGINE,
            "checkpoint": str(CHECKPOINT),
            "concurrency": lanes,
            "speculation": {**speculation, "decision_log": str(log)},
            "prefix_cache": {"enabled": False},
        }
        core = start_inprocess(EngineConfig.model_validate(settings))
        job = AcceptanceJob(settings, CHECKPOINT, {}, DRAFTS, max_tokens, None)
        try:
            run_requests(core, prompts, job)
        finally:
            core.shutdown(0.0)
        del core
        return [entry for entry in read_log(log) if isinstance(entry, Observed)]


def record_acceptance(
    prompts: dict[str, list[Prompt]], per_category: int, max_tokens: int
) -> dict[str, list[str]]:
    """By category: for each request its rounds' accepted counts."""
    chosen = [
        replace(prompt, seed=_FIRST_SEED + place)
        for place, prompt in enumerate(
            prompt for rows in prompts.values() for prompt in rows[:per_category]
        )
    ]
    speculation = {"draft_tokens": DRAFTS, "policy": "fixed", "fixed_width": DRAFTS + 1}
    by_request: dict[int, list[str]] = defaultdict(list)
    for entry in observed_rounds(speculation, chosen, lanes=8, max_tokens=max_tokens):
        for lane in entry.lanes:
            # Lanes near their budget offer fewer: what they would have accepted is not told.
            if lane.offered == DRAFTS:
                by_request[lane.uid].append(str(min(lane.accepted, lane.emitted)))
    # The engine's own readiness check may come first: uids follow the order of submission.
    uids = sorted(by_request)
    first = max(uids, default=0) - len(chosen) + 1
    categories: dict[str, list[str]] = {category: [] for category in prompts}
    for place, prompt in enumerate(chosen):
        rounds = "".join(by_request.get(first + place, []))
        if rounds:
            categories[prompt.category].append(rounds)
    return categories


def record_costs(prompts: dict[str, list[Prompt]], max_tokens: int) -> dict[str, dict[str, int]]:
    """Nanoseconds of a complete round by lanes and width: the first decile, since whatever disturbs
    a round only adds to it."""
    stories = [replace(prompt, seed=_FIRST_SEED + i) for i, prompt in enumerate(prompts["docs"])]
    costs: dict[str, dict[str, int]] = {}
    for lanes in LANES:
        by_width: dict[str, int] = {}
        for width in range(1, DRAFTS + 2):
            speculation = {"draft_tokens": DRAFTS, "policy": "fixed", "fixed_width": width}
            entries = observed_rounds(
                speculation, stories[: 2 * lanes], lanes=lanes, max_tokens=max_tokens
            )
            full = [entry.cost_ns for entry in entries if len(entry.lanes) == lanes]
            by_width[str(width)] = round(statistics.quantiles(full, n=10)[0])
        costs[str(lanes)] = by_width
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RECORDED)
    parser.add_argument("--per-category", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--costs-only", action="store_true", help="Keep the recorded acceptance.")
    options = parser.parse_args(arguments)
    prompts = load_prompts(PROMPTS, CHECKPOINT)
    origin = {"commit": current_commit(), "machine": describe_machine().model_dump()}
    if options.costs_only:
        written = json.loads(options.out.read_text(encoding="utf-8"))
    else:
        acceptance = record_acceptance(prompts, options.per_category, options.max_tokens)
        written = {**origin, "checkpoint": CHECKPOINT.name, "acceptance": acceptance}
    written |= {"costs": origin, "cost_ns": record_costs(prompts, COST_TOKENS)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

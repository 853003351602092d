"""Speculative answers to held-out prompts, float32, with the drafter as it is stored:
``python -m benchmarks.demo_training.packaged.measure CHECKPOINT RUN OUT``.

OUT gets one JSON file a mode as soon as it is done; modes that do not fit into the time are left
out and named.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ..generation import Answers, Generation
from ..speculative import Sampling
from ..storage import round_in_place
from ..train import logger, versions
from .batched import PackagedSession
from .model import PackagedModel, load_drafter, load_target
from .prompts import CATEGORIES, prompts
from .train import WEIGHTS_FILE

MODES = {
    "unit_d3": (1.0, 1.0, 3),
    "greedy_d3": (0.0, 1.0, 3),
    "greedy_d5": (0.0, 1.0, 5),
    "cool_d5": (0.6, 0.95, 5),
    "unit_d5": (1.0, 1.0, 5),
}
"""Temperature, top-p and drafts, the most wanted first."""
SAMPLES = 2
LONGEST_PROMPT = 320


def load(checkpoint: Path, run: Path, device: torch.device) -> PackagedModel:
    """Target and rounded drafter in float32."""
    model = load_target(checkpoint, device, torch.float32)
    load_drafter(model, load_file(run / WEIGHTS_FILE))
    round_in_place(model.drafter, [name for name, _ in model.drafter.named_parameters()])
    return model


def chosen_prompts(tokenizer: Tokenizer, count: int) -> list[tuple[str, list[int]]]:
    """``count`` held-out prompts of every category."""
    kept: dict[str, list[list[int]]] = defaultdict(list)
    for category, text in prompts("held out"):
        if len(kept[category]) < count:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= LONGEST_PROMPT:
                kept[category].append(ids)
        if all(len(kept[c]) == count for c in CATEGORIES):
            return [(category, ids) for category in CATEGORIES for ids in kept[category]]
    raise AssertionError("prompts have no end")


def figures(
    items: list[tuple[str, list[int]]], answers: Answers, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Acceptance by category, and of all."""
    places: dict[str, list[int]] = defaultdict(list)
    for n, (category, _) in enumerate(items):
        places[category].append(n)
    report = {}
    for category, at in [*places.items(), ("all", list(range(len(items))))]:
        rounds, emitted = int(answers.rounds[at].sum()), int(answers.emitted[at].sum())
        accepted, reached = answers.accepted[at].sum(0), answers.reached[at].sum(0)
        report[category] = {
            "prompts": len(at),
            "rounds": rounds,
            "emitted_per_round": round(emitted / max(1, rounds), 3),
            "conditional_acceptance": [
                round(a / n, 3) if n else None
                for a, n in zip(accepted.tolist(), reached.tolist(), strict=True)
            ],
            "samples": [
                tokenizer.decode(answers.tokens[n]) for n in at[: SAMPLES * (category != "all")]
            ],
        }
    return report


def measure(
    checkpoint: Path, run: Path, out: Path, *, seconds: float, count: int, limit: int
) -> list[str]:
    """Write what fits into the time; returns the modes left out."""
    out.mkdir(parents=True, exist_ok=True)
    begin, say = time.monotonic(), logger(out / "log-measure.txt")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(5)
    model = load(checkpoint, run, device)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    items = chosen_prompts(tokenizer, count)
    given, limits = [ids for _, ids in items], [limit] * len(items)
    stop = frozenset((0, model.config["eos_token_id"]))
    say(f"{len(items)} prompts, {versions()}")
    left, longest = list(MODES), 0.0
    while left and time.monotonic() - begin + longest < seconds:
        mode, started = left.pop(0), time.monotonic()
        temperature, top_p, depth = MODES[mode]
        sampling = Sampling(temperature, top_p, depth, limit, stop)
        answers = Generation(partial(PackagedSession, model), given, limits, sampling).run()
        result = figures(items, answers, tokenizer)
        longest = max(longest, time.monotonic() - started)
        written = {"result": result, "limit": limit, "seconds": round(longest, 1)}
        text = json.dumps(written | {"versions": versions()}, indent=1, ensure_ascii=False)
        (out / f"measure-{mode}.json").write_text(text + "\n", "utf-8")
        say(f"{mode}: {result['all']['emitted_per_round']} tokens a round, {longest:.1f} s")
    say(f"left out: {left}")
    return left


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="measure a packaged model's drafter")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("run", type=Path, help="OUT of `train`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="no mode starts too late")
    parser.add_argument("--count", type=int, default=16, help="prompts a category")
    parser.add_argument("--limit", type=int, default=160, help="most tokens of an answer")
    args = parser.parse_args()
    sizes = {"seconds": args.seconds, "count": args.count, "limit": args.limit}
    measure(args.checkpoint, args.run, args.out, **sizes)


if __name__ == "__main__":
    main()

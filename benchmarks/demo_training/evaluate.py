"""Evaluates a demo checkpoint on its held-out prompts, independent of the engine.

``python -m benchmarks.demo_training.evaluate CHECKPOINT [--temperature 1 --top-p 0.95 ...]``
decodes every prompt speculatively with :mod:`benchmarks.demo_training.reference` (one thread,
float32) and reports by
category: acceptance by depth, emitted tokens a round, exact answers, exact tool calls, JSON that
parses, and the teacher-forced loss of the expected answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .chat_format import expected_answer, parse_answer, render
from .reference import Reference, Session
from .shape import MTP_DEPTH
from .speculative import Output, Sampling, generate

PROMPTS = Path(__file__).with_name("eval_prompts.jsonl")
SAMPLES = 4
LIMIT, RAW_LIMIT, SEED = 480, 128, 5


class Tally:
    """Counts of one category."""

    def __init__(self, depth: int):
        self.counts: Counter[str] = Counter()
        self.reached, self.accepted = [0] * depth, [0] * depth
        self.samples: list[dict[str, Any]] = []
        self.loss_sum = 0.0

    def add_rounds(self, output: Output) -> None:
        """Count acceptance by depth; drafts behind a stop token do not count as tried."""
        for accepted, tried, emitted in output.rounds:
            self.counts.update(rounds=1, emitted=emitted)
            for i in range(tried):
                self.reached[i] += i <= accepted
                self.accepted[i] += i < accepted

    def add_answer(self, category: str, text: str, expected: dict[str, Any]) -> None:
        """Compare one answer, starting inside its reasoning, with the expected message."""
        got, want = parse_answer(text), expected_answer(expected)
        same_calls = got["calls"] == want["calls"]
        self.counts.update(answers=1, exact=int(got["content"] == want["content"] and same_calls))
        if want["calls"]:
            self.counts.update(call_turns=1, call_turns_exact=int(same_calls))
        if category == "json":
            self.counts.update(json_parses=int(_parses(got["content"])))

    def report(self) -> dict[str, Any]:
        """JSON-ready figures."""
        c = self.counts
        rounds = max(c["rounds"], 1)
        result: dict[str, Any] = {
            "prompts": c["prompts"],
            "rounds": c["rounds"],
            "emitted": c["emitted"],
            "mean_emitted_per_round": round(c["emitted"] / rounds, 3),
            "conditional_acceptance": [
                round(a / n, 3) if n else None
                for a, n in zip(self.accepted, self.reached, strict=True)
            ],
            "survival": [round(a / rounds, 3) for a in self.accepted],
            "loss": round(self.loss_sum / max(c["loss_tokens"], 1), 4),
        }
        for key in ("answers", "exact", "call_turns", "call_turns_exact", "json_parses"):
            if key in c:
                result[key] = c[key]
        return result | {"samples": self.samples}


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@torch.no_grad()
def answer_loss(
    reference: Reference, tokenizer: Tokenizer, item: dict[str, Any]
) -> tuple[float, int]:
    """Summed negative log-likelihood and count of the answer's tokens (all, for raw text)."""
    prompt = tokenizer.encode(item["prompt"], add_special_tokens=False).ids
    if item["expected"]:
        turn = render([item["expected"]]).split("<|assistant|><think>", 1)[1]
        turn += "<|observation|>" if item["expected"].get("tool_calls") else "<|user|>"
        answer = tokenizer.encode(turn, add_special_tokens=False).ids
    else:
        prompt, answer = prompt[:1], prompt[1:]
    ids = torch.tensor(prompt + answer)
    _, logits = Session(reference).verify(ids[:-1])
    log_p = torch.log_softmax(logits[len(prompt) - 1 :], -1)
    return -log_p.gather(-1, ids[len(prompt) :, None]).sum().item(), len(answer)


def evaluate(
    folder: Path, items: Iterable[dict[str, Any]], sampling: Sampling, *, raw_limit: int, seed: int
) -> dict[str, Any]:
    """Tallies by category over evaluation items; sampling draws from one generator in item order.

    ``raw_limit`` bounds the continuation of raw text, which seldom ends by itself.
    """
    reference = Reference(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    tallies: dict[str, Tally] = defaultdict(lambda: Tally(sampling.depth))
    for item in items:
        tally = tallies[item["category"]]
        prompt = tokenizer.encode(item["prompt"], add_special_tokens=False).ids
        limit = sampling.limit if item["expected"] else raw_limit
        one = dataclasses.replace(sampling, limit=limit)
        output = generate(reference, prompt, one, generator)
        kept = [t for t in output.tokens if t not in sampling.stop]
        text = tokenizer.decode(kept, skip_special_tokens=False)
        tally.counts["prompts"] += 1
        tally.add_rounds(output)
        if item["expected"]:
            tally.add_answer(item["category"], text, item["expected"])
        loss, count = answer_loss(reference, tokenizer, item)
        tally.loss_sum += loss
        tally.counts["loss_tokens"] += count
        if len(tally.samples) < SAMPLES:
            accepted = [r[0] for r in output.rounds]
            tally.samples.append(
                {"prompt": item["prompt"][-600:], "output": text, "accepted": accepted}
            )
    return {category: tally.report() for category, tally in tallies.items()}


def selected(path: Path, count: int, categories: list[str]) -> list[dict[str, Any]]:
    """The first ``count`` prompts of each category, or of each named category."""
    seen: Counter[str] = Counter()
    items = []
    for line in path.read_text("utf-8").split("\n"):
        if not line:
            continue
        item = json.loads(line)
        seen[item["category"]] += 1
        if seen[item["category"]] <= count and (not categories or item["category"] in categories):
            items.append(item)
    return items


def stop_ids(folder: Path) -> frozenset[int]:
    """Ids that end an answer, from the checkpoint's configuration."""
    return frozenset(
        json.loads((folder / "config.json").read_text())["text_config"]["eos_token_id"]
    )


def run_evaluation(
    folder: Path,
    items: list[dict[str, Any]],
    sampling: Sampling,
    *,
    raw_limit: int = RAW_LIMIT,
    seed: int = SEED,
) -> dict[str, Any]:
    """Evaluate the items on one thread; the result names its settings."""
    torch.set_num_threads(1)
    start = time.monotonic()
    categories = evaluate(folder, items, sampling, raw_limit=raw_limit, seed=seed)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "depth": sampling.depth,
        "limit": sampling.limit,
        "raw_limit": raw_limit,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "categories": categories,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="evaluate a demo checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--depth", type=int, default=MTP_DEPTH)
    parser.add_argument("--limit", type=int, default=LIMIT, help="most output tokens of an answer")
    parser.add_argument("--raw-limit", type=int, default=RAW_LIMIT, help="the same for raw text")
    parser.add_argument("--count", type=int, default=24, help="prompts a category")
    parser.add_argument("--category", action="append", default=[], help="may be repeated")
    parser.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args()


def main() -> None:
    """Command line entry."""
    args = _arguments()
    sampling = Sampling(
        args.temperature, args.top_p, args.depth, args.limit, stop_ids(args.checkpoint)
    )
    items = selected(args.prompts, args.count, args.category)
    result = run_evaluation(
        args.checkpoint, items, sampling, raw_limit=args.raw_limit, seed=args.seed
    )
    for category, figures in result["categories"].items():
        print(category, {k: v for k, v in figures.items() if k != "samples"})
    print(f"{result['seconds']} s")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()

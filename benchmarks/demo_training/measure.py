"""Measures a trained checkpoint on many held-out prompts at once, best on a GPU:
``python -m benchmarks.demo_training.measure CHECKPOINT OUT [--folder HELD_OUT]``.

Everything in float32 on the weights as they are stored, with the configuration's selection budget:

- teacher-forced losses and draft overlaps by category;
- long rows with and without the budget;
- questions about codes more than 2,048 tokens back: how often greedy and how probably sampled text
  gives the expected answer;
- speculative answers to the held-out prompts at the default sampling and greedy, with 5 and 7
  drafts, and at temperature one with 5: acceptance by depth, exact answers, tool calls, JSON, edits
  by length.

OUT gets one JSON file a step, so that a run that is cut off leaves the finished ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from .assemble import load_weights
from .chat_format import LAYOUT
from .family import FAMILIES, ChatLayout, Family, family_of
from .generation import Answers, Generation
from .heldout import LONG_ROWS, PROMPTS_FILE, RECALL_FILE, ROWS_FILE, selected, teacher_forced
from .shape import MTP_DEPTH, TEMPERATURE, TOP_P
from .speculative import Sampling, distribution
from .storage import round_in_place

LIMIT, RAW_LIMIT = 900, 128
SLACK = 64
"""Tokens beyond the expected answer after which a wrong one is cut off."""
SHORT_EDIT_LINES = 12
BATCH = 1000
MODES = {
    "sampled_d5": (TEMPERATURE, TOP_P, 5),
    "sampled_d7": (TEMPERATURE, TOP_P, MTP_DEPTH),
    "unit_d5": (1.0, TOP_P, 5),
    "greedy_d5": (0.0, 1.0, 5),
    "greedy_d7": (0.0, 1.0, MTP_DEPTH),
}
SAMPLES = 3


def load_model(folder: Path, device: torch.device, family: Family) -> Any:
    """A checkpoint folder, or the shards of a run in their stored form, in float32."""
    config_file = folder / "config.json"
    stored = config_file.exists()
    config = json.loads(config_file.read_text())["text_config"] if stored else family.text_config()
    model = family.from_published(family.network(config), load_weights(folder)).to(device)
    if not stored:
        names = [name for name, _ in model.named_parameters()]
        round_in_place(model, names, family.stored_format)
    return model.eval()


@torch.no_grad()
def sparse_against_dense(model: Any, folder: Path, device: torch.device) -> dict[str, float]:
    """Mean loss of the held-out long rows under the budget and without one."""
    rows = np.load(folder / ROWS_FILE)[LONG_ROWS].astype(np.int64)
    report = {}
    for name, budget in (("dense", None), ("sparse", model.budget_tokens)):
        model.set_budget(budget)
        losses = []
        for row in torch.from_numpy(rows).to(device).split(1):
            logits = model.logits(model.hidden(row[:, :-2]))
            losses.append(torch.nn.functional.cross_entropy(logits[0], row[0, 1:-1]))
        report[f"{name}_loss"] = round(torch.stack(losses).mean().item(), 5)
    model.set_budget(None)
    report["difference"] = round(report["sparse_loss"] - report["dense_loss"], 5)
    return report


@torch.no_grad()
def distant_recall(
    model: Any, folder: Path, tokenizer: Tokenizer, device: torch.device
) -> dict[str, Any]:
    """Shares of expected answers to the distant questions, greedy and at the default sampling.

    The sampled share is exact, not drawn: the probability that sampling writes the answer is the
    product of its tokens' probabilities.
    """
    items = [json.loads(t) for t in (folder / RECALL_FILE).read_text("utf-8").split("\n") if t]
    sampling = Sampling(TEMPERATURE, TOP_P, 1, 1, frozenset())
    report: dict[str, Any] = {"prompts": len(items)}
    for name, budget in (("dense", None), ("sparse", model.budget_tokens)):
        model.set_budget(budget)
        greedy, sampled, sizes = [], [], []
        for item in items:
            prompt, answer = (
                tokenizer.encode(item[k], add_special_tokens=False).ids
                for k in ("prompt", "answer")
            )
            ids = torch.tensor([prompt + answer], device=device)
            hidden = model.hidden(ids)[:, len(prompt) - 1 : -1]
            logits = model.logits(hidden)[0]
            want = torch.tensor(answer, device=device)
            p = distribution(logits, sampling).gather(-1, want[:, None])
            greedy.append((logits.argmax(-1) == want).all().float())
            sampled.append(p.prod())
            sizes.append(len(prompt))
        report[f"{name}_greedy"] = round(torch.stack(greedy).mean().item(), 4)
        report[f"{name}_sampled"] = round(torch.stack(sampled).mean().item(), 4)
    model.set_budget(None)
    return report | {"shortest_tokens": min(sizes), "longest_tokens": max(sizes)}


def answer_limit(item: dict[str, Any], tokenizer: Tokenizer, chat: ChatLayout) -> int:
    """Output tokens after which an answer is cut off."""
    if not item["expected"]:
        return RAW_LIMIT
    turn = chat.render([item["expected"]]).split(chat.opened, 1)[1]
    return min(LIMIT, len(tokenizer.encode(turn, add_special_tokens=False).ids) + SLACK)


def generate(
    model: Any,
    family: Family,
    items: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    sampling: Sampling,
) -> Answers:
    """Answers to all items, ``BATCH`` at a time, in their order."""
    parts = []
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        prompts = [tokenizer.encode(i["prompt"], add_special_tokens=False).ids for i in batch]
        limits = [answer_limit(i, tokenizer, family.chat) for i in batch]
        parts.append(Generation(partial(family.session, model), prompts, limits, sampling).run())
    return Answers(
        [t for p in parts for t in p.tokens],
        *(torch.cat([getattr(p, name) for p in parts]) for name in Answers.__slots__[1:]),
    )


def judge(item: dict[str, Any], text: str, chat: ChatLayout = LAYOUT) -> dict[str, bool]:
    """What can be said of one answer; keys that do not apply are left out."""
    if not item["expected"]:
        return {}
    got, want = chat.parse_answer(text), chat.expected_answer(item["expected"])
    same_calls = got["calls"] == want["calls"]
    verdict = {"exact": got["content"] == want["content"] and same_calls}
    if want["calls"]:
        verdict["call_exact"] = same_calls
    if item["category"] == "json":
        verdict["json_parses"] = _parses(got["content"])
    if item["category"] == "edit":
        lines = want["content"].count("\n") - 1
        verdict["exact_short" if lines <= SHORT_EDIT_LINES else "exact_long"] = verdict["exact"]
    return verdict


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def summary(
    items: Sequence[dict[str, Any]], answers: Answers, tokenizer: Tokenizer, family: Family
) -> dict[str, dict[str, Any]]:
    """Figures by category."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        places[item["category"]].append(i)
    report = {}
    for category, at in places.items():
        rounds = int(answers.rounds[at].sum())
        accepted, reached = answers.accepted[at].sum(0), answers.reached[at].sum(0)
        verdicts: dict[str, list[bool]] = defaultdict(list)
        samples: list[dict[str, str]] = []
        for i in at:
            kept = [t for t in answers.tokens[i] if t not in family.ids.stop]
            text = tokenizer.decode(kept, skip_special_tokens=False)
            for key, value in judge(items[i], text, family.chat).items():
                verdicts[key].append(value)
            if len(samples) < SAMPLES:
                samples.append({"prompt": items[i]["prompt"][-300:], "output": text})
        report[category] = {
            "prompts": len(at),
            "rounds": rounds,
            "emitted": int(answers.emitted[at].sum()),
            "mean_emitted_per_round": round(int(answers.emitted[at].sum()) / max(rounds, 1), 3),
            "conditional_acceptance": [
                round(a / n, 3) if n else None
                for a, n in zip(accepted.tolist(), reached.tolist(), strict=True)
            ],
            "survival": [round(a / max(rounds, 1), 3) for a in accepted.tolist()],
            **{key: round(sum(v) / len(v), 4) for key, v in verdicts.items()},
            "counts": {key: len(v) for key, v in verdicts.items()},
            "samples": samples,
        }
    return report


def steps_of(
    model: Any,
    family: Family,
    folder: Path,
    tokenizer: Tokenizer,
    items: Sequence[dict[str, Any]],
) -> dict[str, Callable[[], Any]]:
    """Every step by its name."""
    device = model.embed_tokens.weight.device

    def answers(mode: str) -> dict[str, Any]:
        temperature, top_p, depth = MODES[mode]
        sampling = Sampling(temperature, top_p, depth, LIMIT, frozenset(family.ids.stop))
        given = generate(model, family, items, tokenizer, sampling)
        return summary(items, given, tokenizer, family)

    return {
        "teacher_forced": lambda: teacher_forced(model, family, folder, device),
        "long_rows": lambda: sparse_against_dense(model, folder, device),
        "distant_recall": lambda: distant_recall(model, folder, tokenizer, device),
    } | {mode: partial(answers, mode) for mode in MODES}


STEPS = ("teacher_forced", "long_rows", "distant_recall", *MODES)


def measure(checkpoint: Path, out: Path, args: argparse.Namespace) -> None:
    """The chosen steps, each written as soon as it is done."""
    folder = args.folder or out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(5)
    family = family_of(args.family)
    model = load_model(checkpoint, device, family)
    tokenizer = Tokenizer.from_file(str(args.tokenizer or checkpoint / "tokenizer.json"))
    items = selected(args.prompts or folder / PROMPTS_FILE, args.count)
    steps = steps_of(model, family, folder, tokenizer, items)
    failures = []
    for name in args.step or STEPS:
        begin = time.monotonic()
        try:
            result = {"result": steps[name]()}
        except Exception as failure:  # the other steps are worth having; raised below
            failures.append(failure)
            continue
        seconds = round(time.monotonic() - begin, 1)
        path = out / "-".join(filter(None, ("measure", args.tag, f"{name}.json")))
        text = json.dumps(result | {"seconds": seconds}, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
        print(f"measured {args.tag} {name} in {seconds} s", flush=True)
    if failures:
        raise ExceptionGroup("some steps failed", failures)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="measure a trained checkpoint")
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder, or shards of a run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, help="held-out rows and prompts; default: OUT")
    parser.add_argument("--prompts", type=Path, help="other prompts than those of the folder")
    parser.add_argument("--count", type=int, default=10**9, help="prompts a category")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: the checkpoint's")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    parser.add_argument("--step", action="append", choices=STEPS, default=[])
    parser.add_argument("--tag", default="", help="goes into the names of the result files")
    args = parser.parse_args()
    measure(args.checkpoint, args.out, args)


if __name__ == "__main__":
    main()

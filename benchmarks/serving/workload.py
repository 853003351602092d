"""The mixed set: equal numbers of held-out prompts of the ten categories, as clients send them.

Conversations go to /v1/chat/completions (template, parsers), raw text to /v1/completions. Both must
come out as exactly the tokens of the file's rendered prompt, which is what a peer gets; the
service's own prompt count is compared for every request.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.serving.failure import BenchmarkFailure
from benchmarks.support.results import ROOT
from flare_ray.workload.items import openai_message

PROMPTS = ROOT / "benchmarks" / "demo_training" / "eval_prompts.jsonl"
CATEGORIES = (
    *("chat", "define", "story", "math", "json"),
    *("tool", "edit", "recall", "code", "docs"),
)
PROSE = ("docs", "define")
CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
_EFFORT = re.compile(r"Reasoning Effort: (\w+)<")
_FIRST_SEED = 7000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One held-out prompt.

    Attributes:
        place: position within its category.
        ids: tokens of the rendered prompt.
        seed: sampling seed, the same in every arm.
    """

    category: str
    place: int
    text: str
    ids: tuple[int, ...]
    seed: int
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def path(self) -> str:
        """Route that takes it."""
        return TEXT_PATH if self.messages is None else CHAT_PATH

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """A streaming request at the checkpoint's own sampling defaults, in the plain mode."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "seed": self.seed,
            "reproducible": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.messages is None:
            return body | {"prompt": self.text}
        body["messages"] = [openai_message(message) for message in self.messages]
        if self.tools:
            body["tools"] = list(self.tools)
        effort = _EFFORT.search(self.text)
        if effort is not None:
            body["reasoning_effort"] = effort.group(1).lower()
        return body


def load_prompts(path: Path, checkpoint: Path) -> dict[str, list[Prompt]]:
    """Prompts of the file by category, in its order.

    Raises:
        BenchmarkFailure: the file is missing, or lacks a category.
    """
    if not path.is_file():
        raise BenchmarkFailure(f"no prompts at {path}: name a file with --prompts")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        category, tools = row["category"], row.get("tools")
        place = len(found[category])
        found[category].append(
            Prompt(
                category=category,
                place=place,
                text=row["prompt"],
                ids=tuple(tokenizer.encode(row["prompt"]).ids),
                seed=0,
                messages=tuple(row["messages"]) if row["messages"] else None,
                tools=tuple(tools) if tools else None,
            )
        )
    missing = [category for category in CATEGORIES if not found.get(category)]
    if missing:
        raise BenchmarkFailure(f"{path.name} has no prompts of {', '.join(missing)}")
    return {category: found[category] for category in CATEGORIES}


def mixed(
    prompts: Mapping[str, Sequence[Prompt]], per_category: int, *, skip: int = 0
) -> list[Prompt]:
    """Equal prompts of every category, categories taking turns; each gets its seed.

    Args:
        skip: prompts of each category to pass over, so that a warm-up meets other prompts.
    Raises:
        BenchmarkFailure: a category has too few.
    """
    for category, rows in prompts.items():
        if len(rows) < skip + per_category:
            raise BenchmarkFailure(
                f"{skip + per_category} prompts of {category} are needed, the file has {len(rows)}"
            )
    chosen = [
        prompts[category][skip + turn] for turn in range(per_category) for category in prompts
    ]
    return [replace(prompt, seed=_FIRST_SEED + i) for i, prompt in enumerate(chosen)]

"""Checks a demo checkpoint against transformers, in float32 on a CPU.

``python -m benchmarks.demo_training.check_transformers CHECKPOINT [--output FILE]``: the target
part loads without a missing text tensor, its logits and greedy text equal the training model's, the
chat template equals the generators' renderer, and recall works where selection drops tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache

from benchmarks.support.float32_checkpoint import write_float32
from flare_ray.workload.generators.recall import long_recall

from .family import FAMILIES, Family, family_of
from .heldout import FROZEN_PROMPTS, selected

GREEDY_TOKENS = 24
COMPARED = 2
"""Prompts a category whose logits and continuations are compared."""
MAX_LOGIT_DIFFERENCE = 1e-4
"""Contract of the project for float32 logits; the trial measured 4e-5 over 20 prompts."""
LONG_CODES = 250


class Checker:
    """Both implementations of one checkpoint.

    Args:
        folder: the checkpoint, or its float32 copy where it is quantised.
    """

    def __init__(self, folder: Path, family: Family):
        self.family = family
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = getattr(transformers, family.transformers_class).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        self.model, self.info = loaded[0].eval(), loaded[1]
        config = json.loads((folder / "config.json").read_text())["text_config"]
        self.config = config
        own, stored = family.network(config), load_file(folder / "model.safetensors")
        self.own = family.from_published(own, stored).eval()
        self.own.set_budget(self.own.budget_tokens)

    def tensors(self) -> dict[str, list[str]]:
        """Names that matter: text tensors missing, and unexpected ones outside the MTP layer."""
        mtp = (f"layers.{self.config['num_hidden_layers']}.", "mtp.")
        return {
            "missing_text": sorted(k for k in self.info["missing_keys"] if "visual" not in k),
            "unexpected_not_mtp": sorted(
                k for k in self.info["unexpected_keys"] if not any(m in k for m in mtp)
            ),
        }

    def greedy(self, ids: Tensor, count: int) -> Tensor:
        """``count`` greedy tokens [1, count] behind ids [1, T], with the cache."""
        cache = DynamicCache(config=self.model.config.text_config)
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        out: list[Tensor] = []
        for _ in range(count):
            out.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = self.model(input_ids=out[-1], past_key_values=cache, use_cache=True).logits
        return torch.cat(out, 1)

    def compare(self, prompt: str) -> tuple[float, bool]:
        """Largest logit difference over a prompt, and whether the greedy continuations agree."""
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        theirs = self.model(input_ids=ids, use_cache=False).logits
        difference = (theirs - self.own.logits(self.own.hidden(ids))).abs().max().item()
        continued = self.greedy(ids, GREEDY_TOKENS)
        full = torch.cat([ids, continued], 1)
        own = self.own.logits(self.own.hidden(full))[:, ids.shape[1] - 1 : -1].argmax(-1)
        return difference, bool((own == continued).all())

    def template_equal(self, item: dict[str, Any]) -> bool:
        """Whether ``apply_chat_template`` gives the item's prompt, calls in OpenAI's nesting."""
        messages = [dict(m) for m in item["messages"]]
        for message in messages:
            if "tool_calls" in message:
                calls = [{"type": "function", "function": c} for c in message["tool_calls"]]
                message["tool_calls"] = calls
        text = self.tokenizer.apply_chat_template(
            messages, tools=item["tools"], add_generation_prompt=True, tokenize=False
        )
        return bool(text == item["prompt"])

    def long_recall(self, count: int) -> dict[str, int]:
        """Exact answers over contexts longer than ``index_topk``, where selection drops pools."""
        r, exact, lengths = random.Random("long recall"), 0, []
        for _ in range(count):
            messages, answer = long_recall(r, LONG_CODES)
            prompt = self.family.chat.render(messages, generate=True)
            ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
            lengths.append(ids.shape[1])
            want = self.tokenizer(
                self.family.chat.answer_text(answer), add_special_tokens=False
            ).input_ids[:-1]
            got = self.greedy(ids, len(want))[0].tolist()
            exact += got == want
        return {
            "prompts": count,
            "exact": exact,
            "shortest_tokens": min(lengths),
            "longest_tokens": max(lengths),
        }


@torch.no_grad()
def check(folder: Path, prompts: Path, long_prompts: int, family: Family) -> dict[str, Any]:
    """All figures; the caller judges them. Transformers gets the values of the packed weights.

    Args:
        folder: the checkpoint.
        prompts: evaluation prompts.
        family: of the checkpoint.
        long_prompts: questions about a list longer than the selection budget.
    """
    with tempfile.TemporaryDirectory(prefix="flare-check-") as wide:
        write_float32(folder, Path(wide))
        checker = Checker(Path(wide), family)
    chats = [i for i in selected(prompts) if i["messages"]]
    pairs = [checker.compare(i["prompt"]) for i in selected(prompts, COMPARED)]
    return checker.tensors() | {
        "prompts": len(pairs),
        "max_logit_difference": max(p[0] for p in pairs),
        "greedy_equal": sum(p[1] for p in pairs),
        "templates": len(chats),
        "templates_equal": sum(checker.template_equal(i) for i in chats),
        "long_recall": checker.long_recall(long_prompts),
    }


def main() -> None:
    """Command line entry; exits with 1 where transformers disagrees."""
    parser = argparse.ArgumentParser(description="check a demo checkpoint against transformers")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, default=FROZEN_PROMPTS)
    parser.add_argument("--long-prompts", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    result = check(args.checkpoint, args.prompts, args.long_prompts, family_of(args.family))
    result["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    agrees = (
        not result["missing_text"]
        and not result["unexpected_not_mtp"]
        and result["max_logit_difference"] <= MAX_LOGIT_DIFFERENCE
        and result["greedy_equal"] == result["prompts"]
        and result["templates_equal"] == result["templates"]
    )
    raise SystemExit(0 if agrees else 1)


if __name__ == "__main__":
    main()

"""Held-out rows and prompts, and the teacher-forced measures over the rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.recall import distant_recall

from .corpus import load_corpus
from .family import ChatLayout, Family, TokenIds, family_of
from .generators import (
    CATEGORIES,
    CONVERSATIONS,
    LONG_SHARES,
    RAW,
    RAW_CHARS,
    prompt_case,
    raw_text,
)
from .packing import packed_rows
from .settings import Settings
from .shape import LONG_ROW, MTP_DEPTH, SHORT_ROW

ROWS_FILE = "eval_rows.npz"
PROMPTS_FILE = "eval_prompts.jsonl"
RECALL_FILE = "eval_recall.jsonl"
LONG_ROWS = "long"
FROZEN_PROMPTS = Path(__file__).with_name(PROMPTS_FILE)
"""Prompts of the first edition, two dozen a category: the ones that other benchmarks serve."""
RAW_PROMPT_TOKENS = 160
ROWS_AT_ONCE = 8


def write_held_out(settings: Settings) -> None:
    """Write rows of one category each, long rows, questions about codes far back and evaluation
    prompts; runs in its own process.
    """
    tokenizer = Tokenizer.from_file(str(settings.pack / "tokenizer.json"))
    chat = family_of(settings.family).chat
    corpus = load_corpus(settings.pack, "eval", max_files=10**9)

    def taken(seed: str, length: int, shares: dict[str, int], count: int) -> np.ndarray:
        source = random.Random(seed)
        rows = packed_rows(source, corpus, tokenizer, length=length + 2, shares=shares, chat=chat)
        return np.array([next(rows) for _ in range(count)], dtype=np.uint16)

    data = {c: taken(f"eval-{c}", SHORT_ROW, {c: 1}, settings.eval_rows) for c in CATEGORIES}
    write_prompts(corpus, tokenizer, settings.out / PROMPTS_FILE, settings.prompts, chat)
    corpus.long_context = True
    data[LONG_ROWS] = taken("eval-long", LONG_ROW, LONG_SHARES, settings.eval_rows)
    np.savez(settings.out / ROWS_FILE, allow_pickle=False, **data)
    r = random.Random("distant recall")
    items = [distant_recall(r, corpus) for _ in range(settings.prompts)]
    lines = [
        json.dumps({"prompt": chat.render(m, generate=True), "answer": chat.answer_text(a)})
        for m, a in items
    ]
    (settings.out / RECALL_FILE).write_text("\n".join(lines) + "\n", "utf-8")


def selected(path: Path, count: int = 10**9) -> list[dict[str, Any]]:
    """The first ``count`` prompts of each category of a file."""
    seen: Counter[str] = Counter()
    items = []
    for line in path.read_text("utf-8").split("\n"):
        if not line:
            continue
        item = json.loads(line)
        seen[item["category"]] += 1
        if seen[item["category"]] <= count:
            items.append(item)
    return items


def write_prompts(
    corpus: Corpus, tokenizer: Tokenizer, path: Path, count: int, chat: ChatLayout
) -> None:
    """``count`` prompts a category, one JSON object a line; code and documentation prompts are text
    to continue.
    """
    r = random.Random("prompts")
    lines = []
    for category in CONVERSATIONS:
        lines += [prompt_case(category, r, corpus, chat) for _ in range(count)]
    for category, texts in zip(RAW, (corpus.code, corpus.docs), strict=True):
        for _ in range(count):
            ids = tokenizer.encode(
                raw_text(r, texts, RAW_CHARS, chat), add_special_tokens=False
            ).ids
            prompt = tokenizer.decode(ids[:RAW_PROMPT_TOKENS], skip_special_tokens=False)
            lines.append(
                {"category": category, "prompt": prompt, "messages": None, "expected": None}
            )
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


def answer_mask(ids: Tensor, category: str, roles: TokenIds) -> Tensor:
    """[B, T + 1] float: position i predicts a token of an assistant turn or its end marker;
    everything for raw text.
    """
    if category in RAW:
        return torch.ones_like(ids[:, 1:], dtype=torch.float32)
    at = torch.arange(ids.shape[1], device=ids.device)
    ends = torch.isin(ids, torch.tensor(roles.stop, device=ids.device))
    opened = torch.where(ids == roles.answer, at, -1).cummax(1).values
    closed = torch.where(ends, at, -1).cummax(1).values
    return (opened > closed)[:, :-1].float()


@torch.no_grad()
def teacher_forced(
    model: Any, family: Family, folder: Path, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Loss, entropy, top-1 and overlap by draft depth of every category's held-out rows, float32.

    Overlap is ``sum min(p, q)`` between the trunk's and the unrolled MTP's distributions over
    answer tokens at temperature 1: the expected acceptance where the chain so far is right.
    """
    data = np.load(folder / ROWS_FILE)
    report = {}
    for category in CATEGORIES:
        ids = torch.from_numpy(data[category].astype(np.int64)).to(device)
        parts = [
            _row_sums(model, part, answer_mask(part, category, family.ids))
            for part in ids.split(ROWS_AT_ONCE)
        ]
        sums = torch.stack(parts).sum(0)
        nll, count, answer_nll, entropy, top, answers = sums[:6].tolist()
        if not answers:
            raise ValueError(f"the held-out rows of {category} hold no answer: take more rows")
        overlap = (sums[6 : 6 + MTP_DEPTH] / sums[6 + MTP_DEPTH :]).tolist()
        report[category] = {
            "loss_all": round(nll / count, 4),
            "loss_answer": round(answer_nll / answers, 4),
            "entropy_answer": round(entropy / answers, 4),
            "top1_answer": round(top / answers, 4),
            "overlap_by_depth": [round(x, 4) for x in overlap],
        }
    return report


def _row_sums(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[6 + 2 depth] float64: sums that :func:`teacher_forced` divides."""
    hidden = model.hidden(ids[:, :-1])
    embedded = model.embed_tokens(ids[:, 1:-1])
    outs = model.mtp.unroll(embedded, hidden[:, :-1], torch.float32, MTP_DEPTH)
    logits = model.logits(hidden)
    drafts = [model.draft_logits(out) for out in outs]
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    nll = -log_p.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropy = -(p * log_p).sum(-1)
    top = (logits.argmax(-1) == ids[:, 1:]).float()
    sums = [nll.sum(), nll.new_tensor(nll.numel()), (nll * mask).sum()]
    sums += [(entropy * mask).sum(), (top * mask).sum(), mask.sum()]
    at = torch.arange(SHORT_ROW, device=ids.device)
    kept = [mask[:, 1:] * (at > k) for k in range(MTP_DEPTH)]
    overlaps = [torch.minimum(p[:, 1:], torch.softmax(d, -1)).sum(-1) for d in drafts]
    sums += [(o * m).sum() for o, m in zip(overlaps, kept, strict=True)] + [m.sum() for m in kept]
    return torch.stack(sums).double()

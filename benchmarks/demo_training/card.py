"""The model card and the notices of a demo checkpoint, written from the run's own figures.

``python -m benchmarks.demo_training.card RUN PACK CHECKPOINT`` writes ``README.md``, ``NOTICE`` and
``LICENSES/`` into CHECKPOINT and the result files of the benchmarks. No measured number is typed by
hand.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

from benchmarks.support.results import RESULTS

from .figures import (
    COMMAND,
    QUALITY_RESULT,
    TRAINING_RESULT,
    Figures,
    acceptance_table,
    held_out_table,
    prose_emitted,
    results,
    served_quality,
    table,
)
from .prose import MANUALS
from .shape import LONG_ROW, MTP_DEPTH, SHORT_ROW, TEMPERATURE, TOP_P

WIDTH = 98
NOTICES = ("WordNet-3.0.txt", "PSF-2.0.txt", *(f"{package}.txt" for package in MANUALS))


def packages_table(f: Figures) -> str:
    """Licences of the packages whose sources were read."""
    read = f.corpus["characters_by_package"]
    packages = sorted(f.corpus["licences"], key=lambda p: -read.get(p["package"], 0))
    rows = [
        [p["distribution"], p["version"], p["licence"], f"{read.get(p['package'], 0) / 1e6:.2f}"]
        for p in packages
    ]
    return table(["distribution", "version", "licence, as declared", "M characters"], rows)


def notice(f: Figures) -> str:
    """The NOTICE file."""
    return f"""Notices for the weights and the tokenizer in this folder
=========================================================

They were trained on the texts below. The licence texts of the first three are in LICENSES/.

WordNet 3.0 glosses: WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.
  LICENSES/WordNet-3.0.txt. The name of Princeton University may not be used in advertising or
  publicity pertaining to distribution of this folder.
CPython standard library and Python documentation: Copyright 2001-2023 Python Software Foundation;
  All Rights Reserved. LICENSES/PSF-2.0.txt. Changes: a language model was fitted to the text, which
  is not distributed itself.
Manuals of Django (BSD-3-Clause, Copyright Django Software Foundation and individual contributors),
  PostgreSQL (PostgreSQL licence, Copyright The PostgreSQL Global Development Group) and SQLAlchemy
  (MIT, Copyright SQLAlchemy authors and contributors), and of SQLite (public domain). LICENSES/ has
  the upstream part of each Debian package's copyright file.
Python sources and docstrings of these distributions, each under its declared licence:

{packages_table(f)}

Test files and every file that names a GPL, MPL or Creative Commons licence were left out.
benchmarks/demo_training/eval_prompts.jsonl quotes short excerpts of the same texts, unchanged.
"""


def introduction(f: Figures) -> str:
    """What the checkpoint is and is not."""
    p = f.trunk["parameters"]
    return f"""# GLM-5.3-Flash architecture, demo size, trained, second edition

A {p["total"] / 1e6:.2f} M-parameter checkpoint of the `glm5_next` architecture ({p["target"]:,}
target, {p["mtp"]:,} in the multi-token-prediction layer): six layers K K K M K M (KDA and indexed
latent attention), residual-stream mixing, dense and expert feed-forward, an MTP layer trained to
draft {MTP_DEPTH} tokens deep, and index scorers trained for a selection budget of 512 tokens.
Published tensor names, {f.weight_bytes:,} bytes. It exists to exercise a serving engine with real
acceptance behaviour on a laptop. It knows the phrasing of its generators and little else: not an
assistant.

Routed experts are stored as NVFP4, every other matrix of at least 64 rows as FP8 in blocks of 128
x 128, except embedding and head: wider than the lists of the published FP8 and NVFP4 releases,
which leave KDA, `kv_b_proj`, the indexer and `eh_proj` alone. Scales of blocks and whole matrices
are powers of two, so that every stored weight is exact in bfloat16. All figures below are of the
stored form.

The target part loads in transformers 5.24 (`Glm5NextForConditionalGeneration`; `layers.6.*` is
reported as unexpected, the unused vision tower as missing) once its matrices are written out as
floats (`benchmarks/support/float32_checkpoint.py`). Chat template and stop ids follow the
published model. The default sampling is temperature {TEMPERATURE}, top-p {TOP_P}, where the
published model and the first edition have temperature 1.0: a model of this size copies and counts
noticeably worse at 1.0 (figures of both below). The tokenizer is its own, 8,192 entries, byte-level
with single digits, the first edition's.
"""


def data(f: Figures) -> str:
    """Sources, shares and licences."""
    rows = [["1,024 tokens", *f.trunk["shares"].values()]]
    rows += [["4,096 tokens", *(f.trunk["long_shares"][c] for c in f.trunk["shares"])]]
    c = f.corpus
    return f"""## Data

Token weights by category, by length of row:

{table(["rows of", *f.trunk["shares"]], rows)}

- chat, story, math, json, tool, recall: seeded generators of this project
  (`flare_ray/workload/generators`).
- define: 30,000 single-word WordNet 3.0 glosses; the 3,000 most used words are in training and
  evaluation on purpose, so that they can be learnt.
- code, edit: Python files and functions of 3 to 40 lines of the standard library and the packages
  below; each producer reads its own random choice of files (one of them: {c["files"]} files,
  {c["functions"]:,} functions, {sum(c["characters_by_package"].values()) / 1e6:.1f} M
  characters). In a third of the edits names of the function are replaced by invented ones,
  two in five are followed by a second edit, and one in eight is a text to be copied as it is;
  held-out edits are single ones of functions as they are.
- docs: Python documentation sources ({c["docs"]} documents, {c["docs_characters"] / 1e6:.1f} M
  characters), long docstrings of the same files, and prose ({c["prose"]} pages,
  {c["prose_characters"] / 1e6:.1f} M characters): the manuals of Django, PostgreSQL, SQLite and
  SQLAlchemy as Debian packages them, and WordNet entries with their example sentences.

Two per cent of documents, files and rare words are held out by hash; generated evaluation text
uses other seeds. Files that name a GPL, MPL or Creative Commons licence are left out, test files
too.

{packages_table(f)}

## Licences

Weights, tokenizer and card: the licence of this repository. Notices that must travel with them:
[NOTICE](NOTICE) and the texts in [LICENSES](LICENSES).
"""


def training(f: Figures) -> str:
    """Phases and the loss curve."""
    trunk, drafter, sampled = f.trunk["trunk"], f.drafter["drafter"], f.drafter["sampled"]
    s, d = f.trunk["settings"], f.drafter["settings"]
    rows = [
        [
            "trunk",
            f"{trunk['steps']:,} ({trunk['long_steps']} on rows of {LONG_ROW})",
            f"{trunk['tokens']:,}",
            f"{s['rows']} x {SHORT_ROW}",
            trunk["seconds"],
        ],
        ["trunk's index scorers", f.trunk["index"]["steps"], "", "", f.trunk["index"]["seconds"]],
        ["text of the trunk", "", f"{sampled['trunk_tokens']:,}", "", sampled["seconds"]],
        [
            "drafter",
            f"{drafter['steps']:,}",
            f"{drafter['tokens']:,}",
            f"{d['mtp_rows']} x {SHORT_ROW}",
            drafter["seconds"],
        ],
        ["drafter's scorer", f.drafter["index"]["steps"], "", "", f.drafter["index"]["seconds"]],
    ]
    curve = trunk["curve"]
    points = curve[:: max(1, len(curve) // 10)]
    losses = [[p["step"], f"{p['tokens'] / 1e6:.1f}", p["loss"], p["mtp_loss"]] for p in points]
    v, parts = f.trunk["versions"], (f.trunk["index"], f.drafter["index"])
    before, after = (
        [x for part in parts for x in part[key]]
        for key in ("mass_kept_untrained", "mass_kept_last_logged")
    )
    return f"""## Training

One {v["device"]}, torch {v["torch"]}, Python {v["python"]}; trunk and drafter are two runs.

{table(["phase", "steps", "tokens", "rows", "seconds"], rows)}

- **Trunk**: cross-entropy of the next token plus {s["mtp_weight"]} times the MTP layer's of the
  token after it, the trunk not detached; weight one inside assistant turns and raw text,
  {s["prompt_weight"]} in prompts. Orthogonalised momentum (Muon) on the hidden matrices, AdamW
  (0.9, 0.95) on the rest, linear warm-up and decay to zero, weight decay 0.1 on matrices, clip 1.0,
  bfloat16 products with float32 streams and delta rule.
  Documents are packed; nothing masks one from the next. In the last {float(s["long_ratio"]):.0%}
  of the time every second batch has rows of {LONG_ROW} tokens, in the last
  {float(s["rounded_ratio"]):.0%} products see the weights in their stored form
  (straight-through).
- **Drafter**: the MTP layer on; trunk frozen in its stored form; {MTP_DEPTH} recursive steps for
  every position at once, towards the trunk's own distribution (half soft cross-entropy, one total
  variation, a tenth ground truth). Half of the rows are the corpus', half were begun by the
  corpus and written on by the trunk at temperature one.
- **Index**: scorers alone, towards the pooled attention mass of their own layer. Mass held by the
  128 chosen pools of four tokens, two target layers and MTP layer: {before} before, {after}
  after.

Loss of single batches:

{table(["step", "M tokens", "loss", "MTP loss"], losses)}
"""


def exactness(f: Figures) -> str:
    """Answers that have one right form, and the comparison with transformers."""
    q, m, t = served_quality(f), f.measures, f.transformers
    recall, rows, edit = m["distant_recall"], m["long_rows"], m["sampled_d5"]["edit"]
    first, unit, first_unit = f.first["sampled_d5"], m["unit_d5"], f.first["unit_d5"]
    return f"""Unconstrained, at the default sampling (first edition in brackets): tool calls with
    exactly the expected name and arguments {q["tool_valid_ratio"]:.3f}
    ({first["tool"]["call_exact"]:.3f}), JSON that parses {q["json_valid_ratio"]:.3f}
    ({first["json"]["json_parses"]:.3f}) and is right {q["json_correct_ratio"]:.3f}
    ({first["json"]["exact"]:.3f}), edited functions equal {edit["exact"]:.3f}
    ({first["edit"]["exact"]:.3f}), of at most 12 lines {edit["exact_short"]:.3f}
    ({first["edit"]["exact_short"]:.3f}), sums right {m["sampled_d5"]["math"]["exact"]:.3f}
    ({first["math"]["exact"]:.3f}). "Exact answers" means little for story, chat and define under
    sampling: several answers are right.

At temperature 1.0, top-p {TOP_P} (first edition in brackets): tool calls
    {unit["tool"]["call_exact"]:.3f} ({first_unit["tool"]["call_exact"]:.3f}), JSON right
    {unit["json"]["exact"]:.3f} ({first_unit["json"]["exact"]:.3f}), edits
    {unit["edit"]["exact"]:.3f} ({first_unit["edit"]["exact"]:.3f}), of at most 12 lines
    {unit["edit"]["exact_short"]:.3f} ({first_unit["edit"]["exact_short"]:.3f}); tokens a round at
    five drafts {unit["tool"]["mean_emitted_per_round"]:.2f}
    ({first_unit["tool"]["mean_emitted_per_round"]:.2f}) on tool calls and
    {prose_emitted(unit):.2f} ({prose_emitted(first_unit):.2f}) on prose.

A code more than 2,048 tokens back ({recall["shortest_tokens"]} to {recall["longest_tokens"]}
tokens, {recall["prompts"]} questions): right with probability {recall["sparse_sampled"]:.3f} at
the default sampling and in {recall["sparse_greedy"]:.3f} greedy with the budget of 512 tokens,
{recall["dense_sampled"]:.3f} and {recall["dense_greedy"]:.3f} without one. Loss of held-out rows
of 4,096 tokens: {rows["dense_loss"]:.4f} dense, {rows["sparse_loss"]:.4f} with the budget.

Against transformers, float32 on a CPU, on the frozen prompts
(`benchmarks/demo_training/eval_prompts.jsonl`): largest logit difference
{t["max_logit_difference"]:.1e} over {t["prompts"]} prompts, {t["greedy_equal"]} of {t["prompts"]}
greedy continuations equal, {t["templates_equal"]} of {t["templates"]} rendered conversations
equal, text tensors missing: {len(t["missing_text"])}. Recall of one code among 250 there:
{t["long_recall"]["exact"]} of {t["long_recall"]["prompts"]} exact.
"""


def evaluation(f: Figures) -> str:
    """Held-out measures and speculative decoding."""
    q, m = served_quality(f), f.measures
    return f"""## Held-out losses

Teacher-forced in float32; nats per token. "Answer" means tokens of assistant turns with their end
marker, everything for code and docs; "first edition" is its loss on the same tokens. Overlap is the
sum of min(p, q) between the trunk's and the unrolled MTP's distributions: the expected acceptance
where the chain so far is right.

{held_out_table(f)}

## Speculative decoding

True-q rejection sampling by the batched reference in `benchmarks/demo_training`, float32,
selection budget as configured, {q["prompts_per_category"]} held-out prompts a category. Prose
(docs and define) has a mean of {q["mean_emitted_d5_prose"]} tokens a round at five drafts, tool
calls {q["mean_emitted_d5_tool"]}.

Temperature {TEMPERATURE}, top-p {TOP_P}:

{acceptance_table(m["sampled_d5"], m["sampled_d7"])}

Greedy:

{acceptance_table(m["greedy_d5"], m["greedy_d7"])}

Greedy code and documentation fall into loops, which draft well: judge raw text by the sampled
table.

{exactness(f)}"""


LIMITS = """## Limits

- Bound to the phrasing of its generators; a prompt outside them gets off-topic text.
- Sums beyond three digits, products beyond two digits times one, and names in scripts other than
  Latin were not trained.
- English only. No images: the vision part of the configuration has no weights.
- 4,096 tokens at most. Attention was trained dense; selection relies on scorers that were trained
  for seconds, on a frozen trunk.
- Measured on one seed of training and one of sampling.
"""


def retraining(f: Figures) -> str:
    """How to make it again."""
    seed = f.trunk["settings"]["seed"]
    return f"""## Retraining

On a host with one GPU, the packages above and the unpacked Debian packages that `prepare` names:

```
{COMMAND}
```

It packs the texts, trains the tokenizer, trains both parts (seed of the runs here: {seed}),
measures and writes this folder. Where the GPU is elsewhere: `prepare` and `finish` on a CPU,
`train trunk`, `train drafter` and `measure` there; each module's text says how. Phases end by the
clock, so another run gives other weights of like quality. The figures above are in
`benchmarks/results/{QUALITY_RESULT}.json` and `benchmarks/results/{TRAINING_RESULT}.json`.
"""


def reflowed(text: str) -> str:
    """Paragraphs and list items of a Markdown text wrapped to one width; the rest is kept."""
    blocks = []
    for block in text.split("\n\n"):
        if block.lstrip().startswith(("#", "|", "```")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block.strip())
        indent = "  " if block.lstrip().startswith("- ") else ""
        blocks.append(
            "\n".join(
                textwrap.fill(
                    " ".join(item.split()),
                    WIDTH,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for item in items
            )
        )
    return "\n\n".join(blocks) + "\n"


def card(f: Figures) -> str:
    """The whole model card."""
    parts = (introduction(f), data(f), training(f), evaluation(f), LIMITS, retraining(f))
    return reflowed("\n\n".join(part.strip() for part in parts))


def upstream_licence(text: str) -> str:
    """The part of a Debian copyright file that is not about Debian's own packaging files."""
    stanzas = re.split(r"\n\s*\n(?=\S)", text.strip())
    return "\n\n".join(s for s in stanzas if not s.startswith("Files: debian/")) + "\n"


def write_card(run: Path, pack: Path, checkpoint: Path) -> None:
    """Write card, notice, licence texts and result files.

    Raises:
        OSError: if a file of the run or of the pack is missing.
    """
    f = Figures.read(run, checkpoint)
    (checkpoint / "LICENSES").mkdir(exist_ok=True)
    for name in NOTICES:
        text = (pack / name).read_text("utf-8")
        (checkpoint / "LICENSES" / name).write_text(upstream_licence(text), "utf-8")
    (checkpoint / "NOTICE").write_text(notice(f), "utf-8")
    (checkpoint / "README.md").write_text(card(f), "utf-8")
    for written in results(f):
        text = json.dumps(written.model_dump(mode="json"), indent=2, allow_nan=False)
        (RESULTS / f"{written.name}.json").write_text(text + "\n", "utf-8")
        for target in written.targets:
            verdict = "met   " if target.met else "MISSED"
            print(f"{verdict} {target.metric} {target.operator} {target.value}")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="write the model card of a finished run")
    parser.add_argument("run", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    write_card(args.run, args.pack, args.checkpoint)


if __name__ == "__main__":
    main()

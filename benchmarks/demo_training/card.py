"""The model card and the notices of a demo checkpoint, written from the run's own figures.

``python -m benchmarks.demo_training.card RUN PACK CHECKPOINT`` writes ``README.md``,
``NOTICE`` and
``LICENSES/`` into CHECKPOINT and the result file of the benchmarks. No measured number is typed by
hand.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from pathlib import Path

from benchmarks.support.results import RESULTS

from .figures import (
    COMMAND,
    DEPTH_OF_TARGETS,
    RESULT_NAME,
    Figures,
    acceptance_table,
    held_out_table,
    quality,
    result,
    table,
    training_runs,
)
from .shape import LONG_ROW, MTP_DEPTH, SHORT_ROW

WIDTH = 98
NOTICES = ("WordNet-3.0.txt", "PSF-2.0.txt")


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

They were trained on the texts below. The licence texts of the first two are in LICENSES/.

WordNet 3.0 glosses: WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.
  LICENSES/WordNet-3.0.txt. The name of Princeton University may not be used in advertising or
  publicity pertaining to distribution of this folder.
CPython standard library and Python documentation: Copyright 2001-2023 Python Software Foundation;
  All Rights Reserved. LICENSES/PSF-2.0.txt. Changes: a language model was fitted to the text, which
  is not distributed itself.
Python sources and docstrings of these distributions, each under its declared licence:

{packages_table(f)}

Test files and every file that names a GPL, MPL or Creative Commons licence were left out.
benchmarks/demo_training/eval_prompts.jsonl quotes short excerpts of the same texts, unchanged.
"""


def introduction(f: Figures) -> str:
    """What the checkpoint is and is not."""
    p = f.summary["parameters"]
    return f"""# GLM-5.3-Flash architecture, demo size, trained

A {p["total"] / 1e6:.2f} M-parameter checkpoint of the `glm5_next` architecture
({p["target"]:,} target,
{p["mtp"]:,} in the multi-token-prediction layer): six layers K K K M K M (KDA and indexed latent
attention), residual-stream mixing, dense and expert feed-forward, an MTP layer trained to draft
{MTP_DEPTH} tokens deep. Published tensor names, bfloat16 with the float32 tensors of the release,
{f.weight_bytes:,} bytes. It exists to exercise a serving engine with real acceptance behaviour
on a
laptop. It knows the phrasing of its generators and little else: not an assistant.

The target part loads in transformers 5.24 (`Glm5NextForConditionalGeneration`; `layers.6.*` is
reported as unexpected, the unused vision tower as missing). Chat template, stop ids and sampling
defaults (temperature 1.0, top-p 0.95) follow the published model; the tokenizer is its own, 8,192
entries, byte-level with single digits.
"""


def data(f: Figures) -> str:
    """Sources, shares and licences."""
    runs = training_runs(f)
    rows = [[i, *run["shares"].values()] for i, run in enumerate(runs, 1)]
    shares = table(["run", *runs[0]["shares"]], rows)
    c = f.corpus
    return f"""## Data

Per cent of training tokens by category:

{shares}

- chat, story, math, json, tool, recall: seeded generators of this project
  (`benchmarks/demo_training/generators`).
- define: 30,000 single-word WordNet 3.0 glosses; the 3,000 most used words are in training and
  evaluation on purpose, so that they can be learnt.
- code, edit: Python files and functions of the standard library and the packages below; each
  producer reads its own random choice of files (one of them: {c["files"]} files,
  {c["functions"]:,} functions, {sum(c["characters_by_package"].values()) / 1e6:.1f} M characters).
- docs: Python documentation sources ({c["docs"]} documents, {c["docs_characters"] / 1e6:.1f} M
  characters) and long docstrings of the same files, half each.

Two per cent of documents, files and rare words are held out by hash; generated evaluation text
uses other seeds. Files that name a GPL, MPL or Creative Commons licence are left out, test files
too.

{packages_table(f)}

## Licences

Weights, tokenizer and card: the licence of this repository. Notices that must travel with them:
[NOTICE](NOTICE), [WordNet 3.0](LICENSES/WordNet-3.0.txt), [PSF-2.0](LICENSES/PSF-2.0.txt).
"""


def training(f: Figures) -> str:
    """Phases and the loss curve."""
    rows = []
    for i, run in enumerate(training_runs(f), 1):
        s, joint = run["settings"], run["joint"]
        batch = f"{s['rows']} x {SHORT_ROW}"
        note = f"{joint['steps']:,} ({joint['long_steps']} on rows of {LONG_ROW})"
        rows.append([i, "joint", note, f"{joint['tokens']:,}", batch, joint["seconds"]])
        mtp = run["mtp"]
        batch = f"{s['mtp_rows']} x {SHORT_ROW}"
        rows.append([i, "MTP", f"{mtp['steps']:,}", f"{mtp['tokens']:,}", batch, mtp["seconds"]])
        rows.append([i, "index", run["index"]["steps"], "", "", run["index"]["seconds"]])
    head = ["run", "phase", "steps", "tokens", "rows", "seconds"]
    curve = f.summary["joint"]["curve"]
    points = curve[:: max(1, len(curve) // 8)]
    losses = [[p["step"], f"{p['tokens'] / 1e6:.1f}", p["loss"], p["mtp_loss"]] for p in points]
    index = f.summary["index"]
    v = f.summary["versions"]
    return f"""## Training

One {v["device"]}, torch {v["torch"]}, Python {v["python"]}.

{table(head, rows)}

- **Joint**: cross-entropy of the next token plus 0.3 times the MTP layer's of the token after it,
  the trunk not detached. AdamW (0.9, 0.95), linear warm-up and decay to zero, weight decay 0.1 on
  matrices, clip 1.0, bfloat16 products with float32 streams and delta rule. Documents are packed;
  nothing masks one from the next. Towards the end every second batch has rows of {LONG_ROW}
  tokens.
- **MTP**: trunk frozen; {MTP_DEPTH} recursive steps for every position at once, towards the
trunk's own
  distribution (half soft cross-entropy, one total variation, a tenth ground truth).
- **Index**: scorers alone, towards the pooled attention mass of their own layer, so that contexts
  beyond 2,048 tokens select what attention looks at. Mass held by the 512 chosen pools, two target
  layers and MTP layer: {index["mass_kept_untrained"]} before, {index["mass_kept_last_logged"]}
  after.

Loss of single batches in the last run:

{table(["step", "M tokens", "loss", "MTP loss"], losses)}
"""


def exactness(f: Figures) -> str:
    """Answers that have one right form, and the comparison with transformers."""
    g, s, t = f.greedy["categories"], f.sampled["categories"], f.transformers
    tool, sampled = g["tool"], s["tool"]
    recall = t["long_recall"]
    return f"""Tool calls with exactly the expected name and arguments:
  {tool["call_turns_exact"]} of
{tool["call_turns"]} greedy, {sampled["call_turns_exact"]} of {sampled["call_turns"]} sampled.
JSON answers
that parse: {g["json"]["json_parses"]} of {g["json"]["answers"]} greedy,
{s["json"]["json_parses"]} of
{s["json"]["answers"]} sampled. "Exact answers" means little for story, chat and define under
sampling:
several answers are right.

Against transformers, float32 on a CPU: largest logit difference
{t["max_logit_difference"]:.1e} over
{t["prompts"]} prompts, {t["greedy_equal"]} of {t["prompts"]} greedy continuations equal,
{t["templates_equal"]} of {t["templates"]} rendered conversations equal, text tensors missing:
{len(t["missing_text"])}. Recall of one code among 250 at {recall["shortest_tokens"]} to
{recall["longest_tokens"]} tokens, where selection drops pools: {recall["exact"]} of
{recall["prompts"]} exact.
"""


def evaluation(f: Figures) -> str:
    """Held-out measures and speculative decoding."""
    q = quality(f)
    return f"""## Held-out losses

Teacher-forced, on the training GPU; nats per token. "Answer" means tokens of assistant turns with
their end marker, everything for code and docs. Overlap is the sum of min(p, q) between the trunk's
and the unrolled MTP's distributions: the expected acceptance where the chain so far is right.

{held_out_table(f)}

## Speculative decoding

True-q rejection sampling by the reference in `benchmarks/demo_training`, float32, {MTP_DEPTH}
drafts a
round, {f.sampled["categories"]["chat"]["prompts"]} held-out prompts a category
(`benchmarks/demo_training/eval_prompts.jsonl`). The column for K = {DEPTH_OF_TARGETS} follows
from the
measured survivals; prose (docs and define) has a mean of {q["mean_emitted_d5_prose"]}.

Temperature {f.sampled["temperature"]}, top-p {f.sampled["top_p"]}:

{acceptance_table(f.sampled)}

Greedy:

{acceptance_table(f.greedy)}

Greedy code and documentation fall into loops, which draft well: judge raw text by the sampled
table.

{exactness(f)}"""


LIMITS = """## Limits

- Bound to the phrasing of its generators; a prompt outside them gets off-topic text.
- Sums beyond two digits times one digit, and names in scripts other than Latin, were not trained.
- English only. No images: the vision part of the configuration has no weights.
- 4,096 tokens at most. Attention was trained dense; selection beyond 2,048 tokens relies on
  scorers that were trained for seconds.
- Acceptance was measured on one seed and two dozen prompts a category.
"""


def retraining(f: Figures) -> str:
    """How to make it again."""
    seeds = ", ".join(run["settings"]["seed"] for run in training_runs(f))
    return f"""## Retraining

On a host with one GPU, the packages above and the two unpacked Debian packages (`apt-get download
wordnet-base python3.11-doc`, then `dpkg -x` each into UNPACKED):

```
{COMMAND}
```

It packs the texts, trains the tokenizer, trains (seeds of the runs here: {seeds}), evaluates
and writes this folder. Where the GPU is elsewhere: `prepare` and `finish` on a CPU, `train` there;
each
module's text says how. Phases end by the clock, so another run gives other weights of like
quality.
The figures above are in `benchmarks/results/{RESULT_NAME}.json`.
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


def write_card(run: Path, pack: Path, checkpoint: Path) -> None:
    """Write card, notice, licence texts and result file.

    Raises:
        OSError: if a file of the run or of the pack is missing.
    """
    f = Figures.read(run, checkpoint)
    (checkpoint / "LICENSES").mkdir(exist_ok=True)
    for name in NOTICES:
        shutil.copyfile(pack / name, checkpoint / "LICENSES" / name)
    (checkpoint / "NOTICE").write_text(notice(f), "utf-8")
    (checkpoint / "README.md").write_text(card(f), "utf-8")
    written = result(f)
    text = json.dumps(written.model_dump(mode="json"), indent=2, allow_nan=False)
    (RESULTS / f"{RESULT_NAME}.json").write_text(text + "\n", "utf-8")
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

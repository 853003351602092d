"""Model card, notices and result file of the Qwen3.8-Flash demo, from the run's own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.support.results import RESULTS, BenchmarkResult, Bound

from ..assemble import MAX_BYTES
from ..card import NOTICES, notice, packages_table, reflowed, upstream_licence
from ..check_transformers import MAX_LOGIT_DIFFERENCE
from ..figures import (
    Figures,
    acceptance_table,
    prose_emitted,
    result,
    table,
    training_runs,
    without_samples,
)
from ..measure import STEPS
from ..shape import LONG_ROW, MTP_DEPTH, SHORT_ROW, TEMPERATURE, TOP_P

RESULT = "demo_qwen"
COMMANDS = """python -m benchmarks.demo_training.prepare UNPACKED PACK --family qwen
python -m benchmarks.demo_training.train trunk PACK RUN --family qwen
python -m benchmarks.demo_training.train drafter PACK RUN --family qwen
python -m benchmarks.demo_training.measure RUN RUN --tokenizer PACK/tokenizer.json --family qwen
python -m benchmarks.demo_training.finish RUN PACK CHECKPOINT --family qwen"""

BOUNDS = (
    Bound(metric="quality.prompts_per_category", operator=">=", value=200),
    Bound(metric="quality.tool_valid_ratio", operator=">=", value=0.9),
    Bound(metric="quality.json_correct_ratio", operator=">=", value=0.9),
    Bound(metric="quality.edit_equal_short_ratio", operator=">=", value=0.8),
    Bound(metric="quality.edit_equal_ratio", operator=">=", value=0.5),
    Bound(metric="quality.recall_2048_ratio", operator=">=", value=0.8),
    Bound(metric="quality.mean_emitted_d5_tool", operator=">=", value=4.5),
    Bound(metric="quality.mean_emitted_d5_prose", operator=">=", value=1.9),
    Bound(metric="quality.mean_emitted_d5_spread", operator=">=", value=1.0),
    Bound(metric="quality.sparse_minus_dense_nats", operator="<=", value=0.02),
    Bound(metric="quality.weight_bytes", operator="<=", value=MAX_BYTES),
    Bound(
        metric="quality.transformers_max_logit_difference",
        operator="<=",
        value=MAX_LOGIT_DIFFERENCE,
    ),
    Bound(metric="quality.transformers_greedy_equal_ratio", operator=">=", value=1.0),
    Bound(metric="quality.template_equal_ratio", operator=">=", value=1.0),
    Bound(metric="quality.missing_text_tensors", operator="<=", value=0),
)


def read_figures(run: Path, checkpoint: Path) -> Figures:
    """The files of a finished run; there are no frozen prompts and no edition before."""

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((run / f"{name}.json").read_text("utf-8"))
        return content

    return Figures(
        trunk=read("report-trunk"),
        drafter=read("report-drafter"),
        corpus=read("corpus"),
        measures={step: read(f"measure-{step}")["result"] for step in STEPS},
        frozen={},
        first={},
        transformers=read("transformers"),
        weight_bytes=(checkpoint / "model.safetensors").stat().st_size,
    )


def quality(f: Figures) -> dict[str, float]:
    """What the checkpoint shows on held-out prompts, unconstrained, at the default sampling."""
    five, recall, t = f.measures["sampled_d5"], f.measures["distant_recall"], f.transformers
    emitted = [c["mean_emitted_per_round"] for c in five.values()]
    return {
        "prompts_per_category": min(c["prompts"] for c in five.values()),
        "tool_valid_ratio": five["tool"]["call_exact"],
        "json_valid_ratio": five["json"]["json_parses"],
        "json_correct_ratio": five["json"]["exact"],
        "edit_equal_short_ratio": five["edit"]["exact_short"],
        "edit_equal_ratio": five["edit"]["exact"],
        "recall_2048_ratio": recall["sparse_sampled"],
        "mean_emitted_d5_tool": five["tool"]["mean_emitted_per_round"],
        "mean_emitted_d5_prose": prose_emitted(five),
        "mean_emitted_d5_spread": round(max(emitted) - min(emitted), 3),
        "sparse_minus_dense_nats": f.measures["long_rows"]["difference"],
        "weight_bytes": f.weight_bytes,
        "size_mib": round(f.weight_bytes / 2**20, 2),
        "transformers_max_logit_difference": t["max_logit_difference"],
        "transformers_greedy_equal_ratio": t["greedy_equal"] / t["prompts"],
        "template_equal_ratio": t["templates_equal"] / t["templates"],
        "missing_text_tensors": len(t["missing_text"]),
    }


def results(f: Figures) -> BenchmarkResult:
    """The result file; the machine is the one that trained."""
    metrics = {
        "quality": quality(f),
        "parameters": f.trunk["parameters"],
        "training_runs": training_runs(f),
        "held_out_prompts": without_samples(f.measures),
        "transformers": f.transformers,
    }
    return result(f, RESULT, metrics, BOUNDS, COMMANDS)


def introduction(f: Figures) -> str:
    """What the checkpoint is and is not."""
    p = f.trunk["parameters"]
    return f"""# Qwen3.8-Flash architecture, demo size, trained

A {p["total"] / 1e6:.2f} M-parameter checkpoint of the `qwen4_exp` architecture ({p["target"]:,}
target, {p["mtp"]:,} in the multi-token-prediction layer): six layers, two of gated delta rule to
one of attention over selected tokens, four residual streams mixed by low-rank gates, experts with
a gated shared one in every layer, an embedding of hashed n-grams, an MTP layer trained to draft
{MTP_DEPTH} tokens deep, and index scorers trained for a selection budget of 512 tokens. Published
tensor names, {f.weight_bytes:,} bytes. It exists to exercise a serving engine with real acceptance
behaviour on a laptop. It knows the phrasing of its generators and little else: not an assistant.

Routed experts are stored as NVFP4; matrices of recurrent blocks, attention and shared experts as
FP8 in blocks of 128 x 128; everything else in bfloat16, logarithms of decays in float32. All
figures below are of the stored form.

The target part loads in transformers 5.24 (`Qwen4ExpForConditionalGeneration`; `mtp.*` is
reported as unexpected, the unused vision tower as missing) once its matrices are written out as
floats (`benchmarks/support/float32_checkpoint.py`). The chat layout is the family's (ChatML turns,
`<think>`, XML tool calls) with two differences: sentences about effort and tools are shorter, and
an empty reasoning has one line break between its tags, two with thinking off. The default
sampling is temperature {TEMPERATURE}, top-p {TOP_P}. The tokenizer is its own, 8,192 entries,
byte-level with single digits.
"""


def training(f: Figures) -> str:
    """Data and phases."""
    trunk, drafter, sampled = f.trunk["trunk"], f.drafter["drafter"], f.drafter["sampled"]
    s, v = f.trunk["settings"], f.trunk["versions"]
    steps = f"{trunk['steps']:,} ({trunk['long_steps']} on rows of {LONG_ROW})"
    rows = [
        ["trunk", steps, f"{trunk['tokens']:,}", trunk["seconds"]],
        ["trunk's index scorers", f.trunk["index"]["steps"], "", f.trunk["index"]["seconds"]],
        ["text of the trunk", "", f"{sampled['trunk_tokens']:,}", sampled["seconds"]],
        ["drafter", f"{drafter['steps']:,}", f"{drafter['tokens']:,}", drafter["seconds"]],
        ["drafter's scorer", f.drafter["index"]["steps"], "", f.drafter["index"]["seconds"]],
    ]
    shares = [["1,024 tokens", *f.trunk["shares"].values()]]
    shares += [["4,096 tokens", *(f.trunk["long_shares"][c] for c in f.trunk["shares"])]]
    return f"""## Data and training

Token weights by category, by length of row:

{table(["rows of", *f.trunk["shares"]], shares)}

Texts, generators, held-out parts and licences are those of the GLM demo's card beside this one.

{packages_table(f)}

One {v["device"]}, torch {v["torch"]}, Python {v["python"]}; trunk and drafter are two runs on
{s["rows"]} rows of {SHORT_ROW} tokens a step.

{table(["phase", "steps", "tokens", "seconds"], rows)}

Losses, optimisers and rounding as for the GLM demo; a balancing loss of the experts takes the place
of its biases, and matrices that read all streams learn at a lower rate.
"""


def evaluation(f: Figures) -> str:
    """Held-out measures and speculative decoding."""
    q, m, t = quality(f), f.measures, f.transformers
    rows = [
        [
            category,
            *(f"{values[k]:.3f}" for k in ("loss_all", "loss_answer", "entropy_answer")),
            " / ".join(f"{values['overlap_by_depth'][k]:.3f}" for k in (0, 1, 2, 4, 6)),
        ]
        for category, values in m["teacher_forced"].items()
    ]
    head = ["category", "loss, all", "loss, answer", "entropy", "overlap, depth 1/2/3/5/7"]
    unit, long = m["unit_d5"], m["long_rows"]
    return f"""## Held-out losses

{table(head, rows)}

## Speculative decoding

{q["prompts_per_category"]} held-out prompts a category. Temperature {TEMPERATURE}, top-p {TOP_P}:

{acceptance_table(m["sampled_d5"], m["sampled_d7"])}

Greedy:

{acceptance_table(m["greedy_d5"], m["greedy_d7"])}

Tool calls with exactly the expected name and arguments {q["tool_valid_ratio"]:.3f}, JSON right
{q["json_correct_ratio"]:.3f}, edited functions equal {q["edit_equal_ratio"]:.3f}, of at most 12
lines {q["edit_equal_short_ratio"]:.3f}; at temperature 1.0 edits {unit["edit"]["exact"]:.3f}. A
code more than 2,048 tokens back is right with probability {q["recall_2048_ratio"]:.3f} with the
budget of 512 tokens. Loss of held-out rows of 4,096 tokens: {long["dense_loss"]:.4f} dense,
{long["sparse_loss"]:.4f} with the budget.

Against transformers, float32 on a CPU: largest logit difference {t["max_logit_difference"]:.1e}
over {t["prompts"]} prompts, {t["greedy_equal"]} greedy continuations equal,
{t["templates_equal"]} of {t["templates"]} rendered conversations equal.

## Limits

- Bound to the phrasing of its generators; a prompt outside them gets off-topic text.
- English only, no images, 4,096 tokens at most. One seed of training and one of sampling.

## Retraining

```
{COMMANDS}
```

## Licences

Weights, tokenizer and card: the licence of this repository. Notices that must travel with them:
[NOTICE](NOTICE) and the texts in [LICENSES](LICENSES).
"""


def card(f: Figures) -> str:
    """The whole model card."""
    return reflowed("\n\n".join(p.strip() for p in (introduction(f), training(f), evaluation(f))))


def write_card(run: Path, pack: Path, checkpoint: Path) -> None:
    """Write card, notice, licence texts and the result file.

    Raises:
        OSError: if a file of the run or of the pack is missing.
    """
    f = read_figures(run, checkpoint)
    (checkpoint / "LICENSES").mkdir(exist_ok=True)
    for name in NOTICES:
        text = upstream_licence((pack / name).read_text("utf-8"))
        (checkpoint / "LICENSES" / name).write_text(text, "utf-8")
    (checkpoint / "NOTICE").write_text(notice(f), "utf-8")
    (checkpoint / "README.md").write_text(card(f), "utf-8")
    written = results(f)
    text = json.dumps(written.model_dump(mode="json"), indent=2, allow_nan=False)
    (RESULTS / f"{written.name}.json").write_text(text + "\n", "utf-8")
    for target in written.targets:
        verdict = "met   " if target.met else "MISSED"
        print(f"{verdict} {target.metric} {target.operator} {target.value}")

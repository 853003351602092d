"""The figures of a finished run: tables of the model card, quality targets, the result files.

Reads ``report-trunk.json``, ``report-drafter.json``, ``corpus.json``, the ``measure-*.json`` of
:mod:`.measure` and ``transformers.json`` of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.support.results import (
    BenchmarkResult,
    Bound,
    Machine,
    Target,
    current_commit,
)

from .assemble import MAX_BYTES
from .check_transformers import MAX_LOGIT_DIFFERENCE
from .measure import STEPS

TRAINING_RESULT, QUALITY_RESULT = "demo_training_glm", "demo_glm"
COMMAND = "python -m benchmarks.demo_training.run UNPACKED WORK deployments/demo/glm"
PROSE = ("docs", "define")
TRIAL_EXACT = {"math": 1.0, "json": 1.0, "recall": 1.0, "edit": 0.5, "define": 0.55}
"""Greedy exact answers of the trial of this recipe (20 prompts a category; edit 24): the least that
an edition should reach."""
TRIAL_LOSS = {"code": 2.1432, "docs": 2.9121}
"""The trial's held-out losses on text that does not depend on the generators."""
FROZEN_STEPS = ("greedy_d7", "sampled_d5", "sampled_d7")
"""Steps of :mod:`.measure` over the frozen prompts."""
FIRST_STEPS = ("teacher_forced", "sampled_d5", "unit_d5")
"""Steps for the edition before."""

Categories = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything a card quotes, as the run wrote it.

    Attributes:
        trunk: report of the trunk run.
        drafter: report of the drafter run.
        corpus: what one producer read.
        measures: results of :mod:`.measure` by step, over the many held-out prompts.
        frozen: the same over the frozen prompts.
        first: the first edition's, over the prompts and rows of ``measures``.
        transformers: the comparison with transformers.
        weight_bytes: size of the weight file.
    """

    trunk: dict[str, Any]
    drafter: dict[str, Any]
    corpus: dict[str, Any]
    measures: dict[str, Any]
    frozen: dict[str, Any]
    first: dict[str, Any]
    transformers: dict[str, Any]
    weight_bytes: int

    @classmethod
    def read(cls, run: Path, checkpoint: Path) -> Figures:
        """Load the files of a finished run."""

        def read(name: str) -> dict[str, Any]:
            content: dict[str, Any] = json.loads((run / f"{name}.json").read_text("utf-8"))
            return content

        def measured(tag: str, steps: Iterable[str]) -> dict[str, Any]:
            return {step: read(f"measure-{tag}{step}")["result"] for step in steps}

        return cls(
            trunk=read("report-trunk"),
            drafter=read("report-drafter"),
            corpus=read("corpus"),
            measures=measured("", STEPS),
            frozen=measured("frozen-", FROZEN_STEPS),
            first=measured("first-", FIRST_STEPS),
            transformers=read("transformers"),
            weight_bytes=(checkpoint / "model.safetensors").stat().st_size,
        )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def acceptance_table(five: Categories, seven: Categories) -> str:
    """Emitted tokens and acceptance by depth of every category."""
    rows = []
    for category, f in seven.items():
        conditional = " ".join(
            "–" if a is None else f"{a:.2f}" for a in f["conditional_acceptance"]
        )
        exact = f"{f['exact']:.3f}" if "exact" in f else "–"
        means = [f"{g[category]['mean_emitted_per_round']:.2f}" for g in (five, seven)]
        rows.append([category, f["rounds"], *means, conditional, exact])
    head = ["category", "rounds", "tokens a round, K = 5", "K = 7"]
    return table([*head, "conditional acceptance, depth 1 to 7", "exact answers"], rows)


def held_out_table(f: Figures) -> str:
    """Teacher-forced measures of every category, beside the first edition's loss."""
    rows = []
    for category, values in f.measures["teacher_forced"].items():
        overlap = values["overlap_by_depth"]
        rows.append(
            [
                category,
                f"{values['loss_all']:.3f}",
                f"{values['loss_answer']:.3f}",
                f"{f.first['teacher_forced'][category]['loss_answer']:.3f}",
                f"{values['entropy_answer']:.3f}",
                f"{values['top1_answer']:.3f}",
                " / ".join(f"{overlap[k]:.3f}" for k in (0, 1, 2, 4, 6)),
            ]
        )
    head = ["category", "loss, all", "loss, answer", "first edition", "entropy", "top-1"]
    return table([*head, "overlap, depth 1/2/3/5/7"], rows)


def prose_emitted(categories: Categories) -> float:
    """Mean tokens a round over the prose categories."""
    means = [categories[c]["mean_emitted_per_round"] for c in PROSE]
    return round(sum(means) / len(means), 3)


def training_quality(f: Figures) -> dict[str, float]:
    """The trial's numbers, on the frozen prompts and this run's held-out rows."""
    greedy, sampled, t = f.frozen["greedy_d7"], f.frozen["sampled_d5"], f.transformers
    return {
        "weight_bytes": f.weight_bytes,
        "greedy_call_turns_exact_ratio": greedy["tool"]["call_exact"],
        "greedy_json_parse_ratio": greedy["json"]["json_parses"],
        **{f"greedy_{c}_exact_ratio": greedy[c]["exact"] for c in TRIAL_EXACT},
        **{
            f"held_out_{c}_loss": f.measures["teacher_forced"][c]["loss_answer"] for c in TRIAL_LOSS
        },
        "mean_emitted_d5_prose": prose_emitted(sampled),
        "mean_emitted_d5_tool": sampled["tool"]["mean_emitted_per_round"],
        "transformers_max_logit_difference": t["max_logit_difference"],
        "transformers_greedy_equal_ratio": t["greedy_equal"] / t["prompts"],
        "template_equal_ratio": t["templates_equal"] / t["templates"],
        "missing_text_tensors": len(t["missing_text"]),
    }


TRAINING_BOUNDS = (
    *(
        Bound(metric=f"quality.greedy_{c}_exact_ratio", operator=">=", value=v)
        for c, v in TRIAL_EXACT.items()
    ),
    *(
        Bound(metric=f"quality.held_out_{c}_loss", operator="<=", value=v)
        for c, v in TRIAL_LOSS.items()
    ),
    Bound(metric="quality.weight_bytes", operator="<=", value=MAX_BYTES),
    Bound(metric="quality.greedy_call_turns_exact_ratio", operator=">=", value=1.0),
    Bound(metric="quality.greedy_json_parse_ratio", operator=">=", value=1.0),
    Bound(metric="quality.mean_emitted_d5_prose", operator=">=", value=1.9),
    Bound(metric="quality.mean_emitted_d5_tool", operator=">=", value=4.5),
    Bound(
        metric="quality.transformers_max_logit_difference",
        operator="<=",
        value=MAX_LOGIT_DIFFERENCE,
    ),
    Bound(metric="quality.transformers_greedy_equal_ratio", operator=">=", value=1.0),
    Bound(metric="quality.template_equal_ratio", operator=">=", value=1.0),
    Bound(metric="quality.missing_text_tensors", operator="<=", value=0),
)


def served_quality(f: Figures) -> dict[str, float]:
    """What the edition shows on many held-out prompts, unconstrained, at the default sampling."""
    five, recall = f.measures["sampled_d5"], f.measures["distant_recall"]
    emitted = [c["mean_emitted_per_round"] for c in five.values()]
    edit = five["edit"]
    losses = (f.measures["teacher_forced"], f.first["teacher_forced"])
    return {
        "prompts_per_category": min(c["prompts"] for c in five.values()),
        "tool_valid_ratio": five["tool"]["call_exact"],
        "json_valid_ratio": five["json"]["json_parses"],
        "json_correct_ratio": five["json"]["exact"],
        "edit_equal_short_ratio": edit["exact_short"],
        "edit_equal_ratio": edit["exact"],
        "recall_2048_ratio": recall["sparse_sampled"],
        "recall_2048_greedy_ratio": recall["sparse_greedy"],
        "prose_loss_over_first_edition": round(
            losses[0]["docs"]["loss_answer"] - losses[1]["docs"]["loss_answer"], 4
        ),
        "mean_emitted_d5_tool": five["tool"]["mean_emitted_per_round"],
        "mean_emitted_d5_prose": prose_emitted(five),
        "mean_emitted_d5_spread": round(max(emitted) - min(emitted), 3),
        "sparse_minus_dense_nats": f.measures["long_rows"]["difference"],
        "size_mib": round(f.weight_bytes / 2**20, 2),
    }


def temperature_one(f: Figures) -> dict[str, float]:
    """The same at the temperature of the published model, for comparison."""
    unit = f.measures["unit_d5"]
    return {
        "tool_valid_ratio": unit["tool"]["call_exact"],
        "json_correct_ratio": unit["json"]["exact"],
        "edit_equal_short_ratio": unit["edit"]["exact_short"],
        "edit_equal_ratio": unit["edit"]["exact"],
        "mean_emitted_d5_tool": unit["tool"]["mean_emitted_per_round"],
        "mean_emitted_d5_prose": prose_emitted(unit),
    }


SERVED_BOUNDS = (
    Bound(metric="quality.prompts_per_category", operator=">=", value=200),
    Bound(metric="quality.tool_valid_ratio", operator=">=", value=0.9),
    Bound(metric="quality.json_valid_ratio", operator=">=", value=0.9),
    Bound(metric="quality.json_correct_ratio", operator=">=", value=0.9),
    Bound(metric="quality.edit_equal_short_ratio", operator=">=", value=0.8),
    Bound(metric="quality.edit_equal_ratio", operator=">=", value=0.5),
    Bound(metric="quality.recall_2048_ratio", operator=">=", value=0.8),
    Bound(metric="quality.prose_loss_over_first_edition", operator="<=", value=0.0),
    Bound(metric="quality.mean_emitted_d5_tool", operator=">=", value=4.5),
    Bound(metric="quality.mean_emitted_d5_prose", operator=">=", value=1.9),
    Bound(metric="quality.mean_emitted_d5_spread", operator=">=", value=1.0),
    Bound(metric="quality.sparse_minus_dense_nats", operator="<=", value=0.02),
    Bound(metric="quality.size_mib", operator="<=", value=20.0),
)


def without_samples(measures: dict[str, Any]) -> dict[str, Any]:
    """Measures as they go into a result file."""
    return {
        step: {
            c: {k: v for k, v in values.items() if k != "samples"}
            if isinstance(values, dict)
            else values
            for c, values in result.items()
        }
        for step, result in measures.items()
    }


def results(f: Figures) -> list[BenchmarkResult]:
    """The result files; the machine is the one that trained."""
    training = {
        "quality": training_quality(f),
        "parameters": f.trunk["parameters"],
        "training_runs": training_runs(f),
        "held_out": f.measures["teacher_forced"],
        "frozen_prompts": without_samples(f.frozen),
        "transformers": f.transformers,
    }
    served = {
        "quality": served_quality(f),
        "temperature_one": temperature_one(f),
        "held_out_prompts": without_samples(f.measures),
        "first_edition": without_samples(f.first),
    }
    return [
        result(f, TRAINING_RESULT, training, TRAINING_BOUNDS, COMMAND),
        result(f, QUALITY_RESULT, served, SERVED_BOUNDS, COMMAND),
    ]


def result(
    f: Figures, name: str, metrics: dict[str, Any], bounds: Iterable[Bound], command: str
) -> BenchmarkResult:
    """A result file of a run that ``command`` repeats."""
    versions = {n: metadata.version(n) for n in ("transformers", "tokenizers", "safetensors")}
    versions |= {k: f.trunk["versions"][k] for k in ("python", "torch")}
    return BenchmarkResult(
        name=name,
        date=datetime.now(UTC).replace(microsecond=0),
        commit=current_commit(),
        machine=Machine(**f.trunk["machine"]),
        versions=versions,
        command=command,
        metrics=metrics,
        targets=[Target(**b.model_dump(), met=b.is_met_by(metrics)) for b in bounds],
    )


def training_runs(f: Figures) -> dict[str, Any]:
    """Settings and phases of both runs."""
    trunk = {k: f.trunk[k] for k in ("settings", "shares", "long_shares", "trunk", "index")}
    drafter = {k: f.drafter[k] for k in ("settings", "sampled", "drafter", "index")}
    return {"trunk": trunk, "drafter": drafter}

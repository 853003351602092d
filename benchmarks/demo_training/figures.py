"""The figures of a finished run: tables of the model card, quality targets, the result file.

Reads ``summary.json``, ``corpus.json``, ``eval.json``, ``eval_sampled.json``, ``eval_greedy.json``
and ``transformers.json`` of a run.
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

RESULT_NAME = "demo_training_glm"
COMMAND = "python -m benchmarks.demo_training.run UNPACKED WORK deployments/demo/glm"
DEPTH_OF_TARGETS = 5
"""The project's serving figures of this checkpoint are taken at five drafts a round."""
PROSE = ("docs", "define")
TRIAL_EXACT = {"math": 1.0, "json": 1.0, "recall": 1.0, "edit": 0.5, "define": 0.55}
"""Greedy exact answers of the trial of this recipe (20 prompts a category; edit 24): the least that
an edition should reach."""
TRIAL_LOSS = {"code": 2.1432, "docs": 2.9121}
"""The trial's held-out losses on text that does not depend on the generators."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything a card quotes, as the run wrote it."""

    summary: dict[str, Any]
    corpus: dict[str, Any]
    held_out: dict[str, Any]
    sampled: dict[str, Any]
    greedy: dict[str, Any]
    transformers: dict[str, Any]
    weight_bytes: int

    @classmethod
    def read(cls, run: Path, checkpoint: Path) -> Figures:
        """Load the files of a finished run."""

        def read(name: str) -> dict[str, Any]:
            content: dict[str, Any] = json.loads((run / f"{name}.json").read_text("utf-8"))
            return content

        return cls(
            summary=read("summary"),
            corpus=read("corpus"),
            held_out=read("eval"),
            sampled=read("eval_sampled"),
            greedy=read("eval_greedy"),
            transformers=read("transformers"),
            weight_bytes=(checkpoint / "model.safetensors").stat().st_size,
        )


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_emitted(figures: dict[str, Any], depth: int) -> float:
    """Expected tokens a round at ``depth`` drafts, from survivals measured at a larger depth."""
    return round(1 + sum(figures["survival"][:depth]), 3)


def acceptance_table(evaluation: dict[str, Any]) -> str:
    """Acceptance by depth of every category."""
    rows = []
    for category, f in evaluation["categories"].items():
        conditional = " ".join(
            "–" if a is None else f"{a:.2f}" for a in f["conditional_acceptance"]
        )
        exact = f"{f['exact']}/{f['answers']}" if "exact" in f else "–"
        rows.append(
            [
                category,
                f["rounds"],
                f"{f['mean_emitted_per_round']:.2f}",
                f"{mean_emitted(f, DEPTH_OF_TARGETS):.2f}",
                conditional,
                exact,
            ]
        )
    depth = evaluation["depth"]
    return table(
        [
            "category",
            "rounds",
            f"tokens a round, K = {depth}",
            f"K = {DEPTH_OF_TARGETS}",
            f"conditional acceptance, depth 1 to {depth}",
            "exact answers",
        ],
        rows,
    )


def held_out_table(f: Figures) -> str:
    """Teacher-forced measures of every category."""
    rows = []
    for category, values in f.held_out.items():
        overlap = values["overlap_by_depth"]
        rows.append(
            [
                category,
                f"{values['loss_all']:.3f}",
                f"{values['loss_answer']:.3f}",
                f"{values['entropy_answer']:.3f}",
                f"{values['top1_answer']:.3f}",
                " / ".join(f"{overlap[k]:.3f}" for k in (0, 1, 2, 4, 6)),
            ]
        )
    head = ["category", "loss, all", "loss, answer", "entropy", "top-1", "overlap, depth 1/2/3/5/7"]
    return table(head, rows)


def quality(f: Figures) -> dict[str, float]:
    """The numbers that decide whether the checkpoint may ship."""
    sampled, greedy = f.sampled["categories"], f.greedy["categories"]
    prose = [mean_emitted(sampled[c], DEPTH_OF_TARGETS) for c in PROSE]
    t = f.transformers
    return {
        "weight_bytes": f.weight_bytes,
        "greedy_call_turns_exact_ratio": greedy["tool"]["call_turns_exact"]
        / greedy["tool"]["call_turns"],
        "greedy_json_parse_ratio": greedy["json"]["json_parses"] / greedy["json"]["answers"],
        **{
            f"greedy_{c}_exact_ratio": round(greedy[c]["exact"] / greedy[c]["answers"], 3)
            for c in TRIAL_EXACT
        },
        **{f"held_out_{c}_loss": f.held_out[c]["loss_answer"] for c in TRIAL_LOSS},
        "mean_emitted_d5_prose": round(sum(prose) / len(prose), 3),
        "mean_emitted_d5_tool": mean_emitted(sampled["tool"], DEPTH_OF_TARGETS),
        "transformers_max_logit_difference": t["max_logit_difference"],
        "transformers_greedy_equal_ratio": t["greedy_equal"] / t["prompts"],
        "template_equal_ratio": t["templates_equal"] / t["templates"],
        "missing_text_tensors": len(t["missing_text"]),
    }


BOUNDS = (
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


def result(f: Figures) -> BenchmarkResult:
    """The result file; the machine is the one that trained."""

    def without_samples(evaluation: dict[str, Any]) -> dict[str, Any]:
        categories = {
            c: {k: v for k, v in values.items() if k != "samples"}
            for c, values in evaluation["categories"].items()
        }
        return evaluation | {"categories": categories}

    metrics = {
        "quality": quality(f),
        "parameters": f.summary["parameters"],
        "training_runs": training_runs(f),
        "held_out": f.held_out,
        "sampled": without_samples(f.sampled),
        "greedy": without_samples(f.greedy),
        "transformers": f.transformers,
    }
    versions = {n: metadata.version(n) for n in ("transformers", "tokenizers", "safetensors")}
    versions |= {k: f.summary["versions"][k] for k in ("python", "torch")}
    return BenchmarkResult(
        name=RESULT_NAME,
        date=datetime.now(UTC).replace(microsecond=0),
        commit=current_commit(),
        machine=Machine(**f.summary["machine"]),
        versions=versions,
        command=COMMAND,
        metrics=metrics,
        targets=[Target(**b.model_dump(), met=b.is_met_by(metrics)) for b in BOUNDS],
    )


def training_runs(f: Figures) -> list[dict[str, Any]]:
    """Settings and phases of every run behind the weights, the first one first."""
    runs = [*f.summary.get("earlier", []), f.summary]
    return [{k: r[k] for k in ("settings", "shares", "joint", "mtp", "index")} for r in runs]

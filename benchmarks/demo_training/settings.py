"""Settings of the training runs; every number that changes the weights is here, in ``shape`` or in
``generators``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from .shape import LONG_ROW, SHORT_ROW


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of :mod:`benchmarks.demo_training.train`; seconds are wall time after warm-up.

    Attributes:
        pack: folder written by ``prepare``.
        out: folder for shards, log, report, held-out rows and evaluation figures.
        pool: shared-memory folder for rows on their way to the GPU; emptied at start and end.
        trunk_s: the target part, the MTP layer beside it.
        long_ratio: last part of the trunk's time, where every second batch has rows of 4,096
            tokens.
        rounded_ratio: last part of the time of trunk and drafter, where products see the weights
            as they will be stored (NVFP4 and FP8), straight-through.
        index_s: index scorers alone, on rows of 4,096 tokens, in each of the two runs.
        sample_s: text drawn from the finished trunk, for the drafter to train on.
        drafter_s: MTP layer alone, unrolled on the finished trunk.
        rows: rows of 1,024 tokens a trunk step; long steps keep the number of tokens.
        mtp_rows: rows a step of the drafter run.
        sample_rows: rows drawn from the trunk at a time.
        learning_rate: peak of the trunk run.
        mtp_learning_rate: peak of the drafter run.
        mtp_weight: weight of the MTP layer's loss while the trunk trains, so that the trunk's
            states come to carry what a drafter needs.
        prompt_weight: loss weight of tokens that no assistant writes: prompts, tools, results.
        workers: producer processes; a quarter of them, at least one, make long rows.
        files: source files that each producer reads.
        eval_rows: held-out rows a category.
        prompts: held-out evaluation prompts a category.
        family: architecture, one of ``family.FAMILIES``.
        seed: of the weights and the data.
        backend: ``torch.compile`` backend, or ``none``.
        save_s: seconds between two checkpoints of a running phase.
    """

    pack: Path
    out: Path
    pool: Path = Path("/dev/shm/flare_demo_rows")
    trunk_s: float = 430.0
    long_ratio: float = 0.3
    rounded_ratio: float = 0.15
    index_s: float = 20.0
    sample_s: float = 40.0
    drafter_s: float = 240.0
    rows: int = 32
    mtp_rows: int = 32
    sample_rows: int = 2048
    learning_rate: float = 3e-3
    mtp_learning_rate: float = 1.5e-3
    mtp_weight: float = 0.3
    prompt_weight: float = 0.25
    workers: int = 11
    files: int = 700
    eval_rows: int = 24
    prompts: int = 200
    seed: int = 1
    family: str = "glm"
    backend: str = "inductor"
    save_s: float = 90.0

    def __post_init__(self) -> None:
        if self.sample_s <= 0:
            raise ValueError(
                f"sample_s is {self.sample_s}; give the drafter some of the trunk's text"
            )
        if self.rows % self.mtp_rows or self.workers < 2:
            raise ValueError(
                f"rows {self.rows} must be a multiple of mtp_rows {self.mtp_rows}, and workers "
                f"{self.workers} at least 2"
            )

    @property
    def long_rows(self) -> int:
        """Rows of a long batch: as many tokens as a short one, at least one row."""
        return max(1, self.rows * SHORT_ROW // LONG_ROW)

    @property
    def long_workers(self) -> int:
        """Producers of long rows."""
        return max(1, self.workers // 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Two folders, then ``--name value`` for every other field of `Settings`."""
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    for field in fields(Settings)[2:]:
        default = field.default
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=type(default), default=default
        )


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from parsed options; options of other names are left alone."""
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})

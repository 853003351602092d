"""Settings of one training run; every number that changes the weights is here or in ``shape``."""

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
        out: folder for shards, log, summary, held-out losses and evaluation prompts.
        pool: shared-memory folder for rows on their way to the GPU; emptied at start and end.
        joint_s: trunk and MTP together.
        long_ratio: last part of the joint phase, where every second batch has rows of 4,096 tokens.
        mtp_s: MTP alone, unrolled.
        index_s: index scorers alone, on rows of 4,096 tokens.
        total_s: wall seconds of the whole run; when given, the joint phase takes what the others
            leave of it and ``joint_s`` is not used.
        rows: rows of 1,024 tokens a joint step; long steps keep the number of tokens.
        mtp_rows: rows a step of the MTP phase.
        learning_rate: peak of the joint phase.
        mtp_learning_rate: peak of the MTP phase.
        mtp_weight: weight of the MTP loss in the joint phase.
        workers: producer processes; a quarter of them, at least one, make long rows.
        files: source files that each producer reads.
        eval_rows: held-out rows a category.
        prompts: evaluation prompts a category.
        seed: of the weights and the data.
        backend: ``torch.compile`` backend, or ``none``.
        resume: folder with the weights and ``summary.json`` of an earlier run, or none; its weights
            replace the initial ones. The optimiser starts anew; choose another seed for other data.
    """

    pack: Path
    out: Path
    pool: Path = Path("/dev/shm/flare_demo_rows")
    joint_s: float = 600.0
    long_ratio: float = 0.3
    mtp_s: float = 170.0
    index_s: float = 25.0
    total_s: float = 0.0
    rows: int = 64
    mtp_rows: int = 32
    learning_rate: float = 2e-3
    mtp_learning_rate: float = 1.5e-3
    mtp_weight: float = 0.3
    workers: int = 13
    files: int = 900
    eval_rows: int = 24
    prompts: int = 24
    seed: int = 1
    backend: str = "inductor"
    resume: Path | None = None

    def __post_init__(self) -> None:
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


def parse_settings(description: str) -> Settings:
    """Settings from the command line: two folders, then ``--name value`` for every other field."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    for field in fields(Settings)[2:]:
        default = field.default
        kind = Path if default is None or isinstance(default, Path) else type(default)
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=default)
    return Settings(**vars(parser.parse_args()))

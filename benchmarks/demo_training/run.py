"""Retrains the demo checkpoint on a host with one GPU, from unpacked texts to the model card.

``python -m benchmarks.demo_training.run UNPACKED WORK CHECKPOINT``: see ``prepare`` for UNPACKED.
What lies in CHECKPOINT is measured beside the new edition, then replaced. Where the GPU host is
another machine, run ``prepare`` here, ``train`` and ``measure`` there and ``finish`` here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .figures import FIRST_STEPS, FROZEN_STEPS
from .finish import finish
from .glm_family import GLM
from .heldout import FROZEN_PROMPTS
from .prepare import prepare

PACKAGE = __package__


def steps(pack: Path, run: Path, checkpoint: Path) -> list[list[str]]:
    """Module and arguments of every process on the GPU, in their order."""
    tokenizer = ["--tokenizer", str(pack / "tokenizer.json")]
    frozen = ["--tag", "frozen", "--prompts", str(FROZEN_PROMPTS)]
    frozen += _chosen(FROZEN_STEPS)
    first = ["--tag", "first", *_chosen(FIRST_STEPS)]
    return [
        ["train", "trunk", str(pack), str(run)],
        ["train", "drafter", str(pack), str(run)],
        ["measure", str(run), str(run), *tokenizer],
        ["measure", str(run), str(run), *tokenizer, *frozen],
        ["measure", str(checkpoint), str(run), *first],
    ]


def _chosen(steps: Sequence[str]) -> list[str]:
    return [word for step in steps for word in ("--step", step)]


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="retrain the demo checkpoint")
    parser.add_argument("unpacked", type=Path, help="unpacked Debian packages, see prepare")
    parser.add_argument("work", type=Path, help="folder for packed texts and the run")
    parser.add_argument("checkpoint", type=Path, help="folder to measure against and publish into")
    args = parser.parse_args()
    pack, run = args.work / "pack", args.work / "run"
    prepare(args.unpacked, pack, GLM, args.checkpoint / "tokenizer.json")
    for module, *arguments in steps(pack, run, args.checkpoint):
        subprocess.run([sys.executable, "-m", f"{PACKAGE}.{module}", *arguments], check=True)
    finish(run, pack, args.checkpoint, GLM)


if __name__ == "__main__":
    main()

"""Retrains the demo checkpoint on a host with one GPU, from unpacked texts to the model card.

``python -m benchmarks.demo_training.run UNPACKED WORK CHECKPOINT [--total-s 1200]``: see
``prepare`` for UNPACKED. Where the GPU host is another machine, run ``prepare`` here, ``train``
there and ``finish`` here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .finish import finish
from .prepare import prepare
from .settings import Settings
from .train import train


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="retrain the demo checkpoint")
    parser.add_argument("unpacked", type=Path, help="unpacked Debian packages, see prepare")
    parser.add_argument("work", type=Path, help="folder for packed texts and the run")
    parser.add_argument("checkpoint", type=Path, help="folder to publish into")
    parser.add_argument(
        "--total-s", type=float, default=0.0, help="bound on the training's seconds"
    )
    args = parser.parse_args()
    pack, run = args.work / "pack", args.work / "run"
    prepare(args.unpacked, pack)
    train(Settings(pack, run, total_s=args.total_s))
    finish(run, pack, args.checkpoint)


if __name__ == "__main__":
    main()

"""What follows training and measuring, on a CPU: checkpoint folder, transformers check, model card.

``python -m benchmarks.demo_training.finish RUN PACK CHECKPOINT``. RUN is the ``OUT`` of ``train``
and ``measure``; the figures behind the card are read from it and ``transformers.json`` is written
into it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .assemble import assemble
from .card import write_card
from .check_transformers import check
from .heldout import FROZEN_PROMPTS

LONG_PROMPTS = 4


def finish(run: Path, pack: Path, checkpoint: Path) -> None:
    """Everything from the shards to the card."""
    assemble(run, pack, checkpoint)
    text = json.dumps(check(checkpoint, FROZEN_PROMPTS, LONG_PROMPTS), indent=1)
    (run / "transformers.json").write_text(text + "\n", "utf-8")
    write_card(run, pack, checkpoint)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="from shards to the published checkpoint")
    parser.add_argument("run", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    finish(args.run, args.pack, args.checkpoint)


if __name__ == "__main__":
    main()

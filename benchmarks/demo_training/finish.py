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
from .family import FAMILIES, Family, family_of
from .heldout import FROZEN_PROMPTS, PROMPTS_FILE
from .qwen.card import write_card as write_qwen_card

LONG_PROMPTS = 4


def finish(run: Path, pack: Path, checkpoint: Path, family: Family) -> None:
    """Everything from the shards to the card."""
    assemble(run, pack, checkpoint, family)
    frozen = family.name == "glm"
    prompts = FROZEN_PROMPTS if frozen else run / PROMPTS_FILE
    text = json.dumps(check(checkpoint, prompts, LONG_PROMPTS, family), indent=1)
    (run / "transformers.json").write_text(text + "\n", "utf-8")
    (write_card if frozen else write_qwen_card)(run, pack, checkpoint)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="from shards to the published checkpoint")
    parser.add_argument("run", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    args = parser.parse_args()
    finish(args.run, args.pack, args.checkpoint, family_of(args.family))


if __name__ == "__main__":
    main()

"""What follows training, on a CPU: checkpoint folder, evaluation, transformers check, model card.

``python -m benchmarks.demo_training.finish RUN PACK CHECKPOINT`` takes about half an hour on one
core. RUN is the ``OUT`` of ``train``; the figures behind the card are written into it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .assemble import assemble
from .card import write_card
from .check_transformers import check
from .evaluate import LIMIT, run_evaluation, selected, stop_ids
from .heldout import PROMPTS_FILE
from .shape import MTP_DEPTH, generation_config
from .speculative import Sampling

LONG_PROMPTS = 8


def finish(run: Path, pack: Path, checkpoint: Path) -> None:
    """Everything from the shards to the card; evaluations already in ``run`` are measured anew."""
    assemble(run, pack, checkpoint)
    prompts = run / PROMPTS_FILE
    items = selected(prompts, 10**9, [])
    defaults, stop = generation_config(), stop_ids(checkpoint)
    modes = {
        "eval_sampled": (float(defaults["temperature"]), float(defaults["top_p"])),
        "eval_greedy": (0.0, 1.0),
    }
    for name, (temperature, top_p) in modes.items():
        sampling = Sampling(temperature, top_p, MTP_DEPTH, LIMIT, stop)
        _write(run / f"{name}.json", run_evaluation(checkpoint, items, sampling))
    _write(run / "transformers.json", check(checkpoint, prompts, LONG_PROMPTS))
    write_card(run, pack, checkpoint)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


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

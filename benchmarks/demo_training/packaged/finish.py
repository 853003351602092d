"""From a run's weights to the published drafter and its card, on a CPU:
``python -m benchmarks.demo_training.packaged.finish CHECKPOINT RUN FOLDER``.

RUN holds what `sample`, `train` and `measure` wrote. `flare-ray fetch smollm2 --drafter FOLDER`
joins the result to the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from flare_ray.device.weights.quantiser import quantise_tensors
from flare_ray.recipes.drafted import DRAFTER_FILE

from ..storage import stored_format
from .measure import MODES
from .model import TOKENS
from .train import WEIGHTS_FILE

MAX_BYTES = 8 * 2**20
SHARED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
"""Settings in which a target must equal the one that the drafter was trained on."""


def finish(checkpoint: Path, run: Path, folder: Path) -> None:
    """Write drafter.safetensors, config.json and README.md.

    Raises:
        ValueError: the file is larger than a drafter may be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(run / WEIGHTS_FILE)
    path = folder / DRAFTER_FILE
    save_file(quantise_tensors(tensors, stored_format), path, metadata={"format": "pt"})
    path.chmod(0o644)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_BYTES} may ship")
    target = json.loads((checkpoint / "config.json").read_text("utf-8"))
    [drafted] = [len(t) for name, t in tensors.items() if name.endswith(TOKENS)]
    settings = {key: target[key] for key in SHARED} | {"num_nextn_predict_layers": 1}
    settings["draft_vocab_size"] = drafted
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    parameters = sum(t.numel() for name, t in tensors.items() if not name.endswith(TOKENS))
    (folder / "README.md").write_text(_card(run, settings, parameters, size), "utf-8")


def _card(run: Path, settings: dict[str, Any], parameters: int, size: int) -> str:
    sampled, trained = (
        json.loads((run / f"report-{part}.json").read_text("utf-8")) for part in ("sample", "train")
    )
    measured = {
        mode: json.loads(path.read_text("utf-8"))
        for mode in MODES
        if (path := run / f"measure-{mode}.json").exists()
    }
    overlap = ", ".join(f"{x:.3f}" for x in trained.get("held_out_overlap", []))
    return f"""# A drafter for SmolLM2-135M-Instruct

One layer over pairs of the model's state and the next token (multi-token prediction), for
`flare-ray fetch smollm2 --drafter deployments/demo/smollm2`. The model itself is unchanged, and so
are its texts: drafts are verified. It is Apache-2.0, like the model.

| | |
|---|---|
| parameters | {parameters:,}, matrices in block FP8 with scales that are powers of two |
| file | {size:,} bytes |
| head | the model's own, {settings["draft_vocab_size"]:,} of {settings["vocab_size"]:,} rows |
| trained on | {trained["written"]:,} tokens that the model wrote in {trained["conversations"]:,} \
answers, at temperatures {", ".join(map(str, sorted(set(sampled["temperatures"]))))} |
| drafted tokens | {trained["drafted_share"]:.2%} of what the model wrote |
| training | {trained["steps"]:,} steps, {trained["tokens"] / 1e6:.1f} M tokens read, \
{trained["settings"]["depth"]} drafts unrolled, {trained["seconds"]:g} s |
| sampling | {sampled["seconds"]:g} s |
| device | {trained["versions"]["device"]}, torch {trained["versions"]["torch"]} |
| held-out overlap by depth | {overlap or "not measured"} |

Prompts are composed by `benchmarks/demo_training/packaged/prompts.py`: the shared generators, open
questions over lists of its own, and functions and pages of this project. Nothing of others was
read, and no answer but the model's own.

## Acceptance

Tokens a round on held-out prompts of the same kinds, float32, the model and the drafter sampled
alike; in brackets the chance that a draft is accepted where those before it were.

{_table(measured) if measured else "Not measured."}

## How it was made

```
flare-ray fetch smollm2 --out MODEL
python -m benchmarks.demo_training.packaged.sample MODEL RUN
python -m benchmarks.demo_training.packaged.train MODEL RUN RUN
python -m benchmarks.demo_training.packaged.measure MODEL RUN RUN
python -m benchmarks.demo_training.packaged.finish MODEL RUN deployments/demo/smollm2
```
"""


def _table(measured: dict[str, dict[str, Any]]) -> str:
    names = list(next(iter(measured.values()))["result"])
    told = {
        mode: f"T {MODES[mode][0]:g}, top-p {MODES[mode][1]:g}, {MODES[mode][2]} drafts"
        for mode in measured
    }
    lines = ["| prompts | " + " | ".join(told.values()) + " |", "|---" * (len(told) + 1) + "|"]
    for name in names:
        cells = []
        for report in measured.values():
            entry = report["result"][name]
            chances = " ".join(
                "-" if x is None else f"{x:.2f}" for x in entry["conditional_acceptance"]
            )
            cells.append(f"{entry['emitted_per_round']:.2f} ({chances})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="from a run to the published drafter")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    finish(args.checkpoint, args.run, args.folder)


if __name__ == "__main__":
    main()

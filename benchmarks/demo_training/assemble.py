"""Joins the shards of both runs into a checkpoint folder in published layout, quantised.

``python -m benchmarks.demo_training.assemble RUN PACK CHECKPOINT``
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flare_ray.device.weights.quantiser import declaration_of, dequantise_tensors, quantise_tensors

from .family import FAMILIES, Family, family_of
from .vocabulary import tokenizer_config

MAX_BYTES = 20 * 2**20


def load_shards(run: Path, part: str) -> dict[str, Tensor]:
    """Tensors of one part of a run, ``trunk`` or ``drafter``, under published names.

    Raises:
        FileNotFoundError: if the folder holds no such weights.
    """
    shards = sorted(run.glob(f"{part}-*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no {part}-*.safetensors in {run}: did its training run end?")
    return {name: t for shard in shards for name, t in load_file(shard).items()}


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Plain tensors of a checkpoint folder, dequantised, or of a run's shards."""
    checkpoint = folder / "model.safetensors"
    if checkpoint.exists():
        return dequantise_tensors(load_file(checkpoint), torch.float32)
    return load_shards(folder, "trunk") | load_shards(folder, "drafter")


def assemble(run: Path, pack: Path, checkpoint: Path, family: Family) -> None:
    """Write weights, configurations and tokenizer.

    Raises:
        ValueError: if the weight file exceeds ``MAX_BYTES``.
    """
    tensors = dict(sorted((load_shards(run, "trunk") | load_shards(run, "drafter")).items()))
    checkpoint.mkdir(parents=True, exist_ok=True)
    path = checkpoint / "model.safetensors"
    save_file(quantise_tensors(tensors, family.stored_format), path, metadata={"format": "pt"})
    path.chmod(0o644)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} may ship")
    declared = declaration_of(tensors, family.stored_format)
    shutil.copyfile(pack / "tokenizer.json", checkpoint / "tokenizer.json")
    for name, value in (
        ("config", family.checkpoint_config() | {"quantization_config": declared}),
        ("generation_config", family.generation_config()),
        ("tokenizer_config", tokenizer_config(family)),
    ):
        text = json.dumps(value, indent=1, ensure_ascii=False)
        (checkpoint / f"{name}.json").write_text(text + "\n", "utf-8")
    parameters = sum(t.numel() for t in tensors.values())
    print(f"{len(tensors)} tensors, {parameters} parameters, {path.stat().st_size} bytes")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="join shards into a checkpoint folder")
    parser.add_argument("run", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    args = parser.parse_args()
    assemble(args.run, args.pack, args.checkpoint, family_of(args.family))


if __name__ == "__main__":
    main()

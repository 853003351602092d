"""A float32 copy of a checkpoint, for comparisons with libraries that read no packed weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flare_ray.device.weights.quantiser import dequantise_tensors

COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def write_float32(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint with every floating-point tensor as float32, quantised matrices as the
    values that the service computes with.
    """
    for name in COPIED:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    wide = {
        name: tensor.float().contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in dequantise_tensors(stored, torch.float32).items()
    }
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})

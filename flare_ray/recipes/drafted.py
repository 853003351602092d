"""Joins a drafter that was trained apart to the checkpoint of its target.

A drafter's folder holds `config.json`, whose settings are added to the target's, and
`drafter.safetensors`: the drafter's tensors by published name, matrices plain or in block FP8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flare_ray.device.weights.index import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from flare_ray.device.weights.quantiser import dequantise_tensors
from flare_ray.errors import CheckpointError
from flare_ray.recipes import registry
from flare_ray.recipes.declaration import resolve

DRAFTER_FILE = "drafter.safetensors"
OWN = {"num_nextn_predict_layers", "draft_vocab_size"}
"""Settings of the drafter alone, which an earlier one may have left in the target's folder."""


def join(folder: Path, source: Path) -> None:
    """Write a drafter's tensors, settings and an index into the checkpoint folder of its target.

    Quantised matrices become BF16, which holds them exactly, so that the folder declares no
    quantisation. The index is written last: before, the folder is the target alone.

    Args:
        folder: config.json and model.safetensors of the target; what was joined before is replaced.
        source: folder of the drafter.
    Raises:
        CheckpointError: a file is missing or damaged; the two differ in a setting that both have;
            tensors are not those of the recipe's drafter.
        ConfigError: no recipe serves the joined checkpoint.
    """
    (folder / INDEX_FILE).unlink(missing_ok=True)
    target, added = _settings(folder), _settings(source)
    target = {key: value for key, value in target.items() if key not in OWN}
    shared = sorted(target.keys() & added.keys())
    if differing := [key for key in shared if target[key] != added[key]]:
        raise CheckpointError(
            f"{source} is no drafter of {folder}: settings differ",
            tuple(f"{key}: {added[key]!r}, the target has {target[key]!r}" for key in differing),
        )
    joined = target | added
    tensors = _tensors(source)
    _check(joined, {name: tuple(t.shape) for name, t in tensors.items()}, source)
    save_file(tensors, folder / DRAFTER_FILE, metadata={"format": "pt"})
    with safe_open(folder / SINGLE_FILE, framework="pt") as file:
        weight_map = dict.fromkeys(file.keys(), SINGLE_FILE)
    weight_map |= dict.fromkeys(tensors, DRAFTER_FILE)
    _write(folder / CONFIG_FILE, joined)
    _write(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def part(folder: Path) -> None:
    """Remove what `join` added but the settings, for a folder that is about to be made anew."""
    for name in (INDEX_FILE, DRAFTER_FILE):
        (folder / name).unlink(missing_ok=True)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return settings


def _tensors(source: Path) -> dict[str, Tensor]:
    path = source / DRAFTER_FILE
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return dequantise_tensors(stored, torch.bfloat16)


def _check(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Compare names and shapes with the recipe's manifest."""
    recipe = registry.find_recipe(config)
    specs = resolve(recipe.manifest)(resolve(recipe.geometry)(config))
    wanted = {spec.name: spec.shape for spec in specs if spec.family == "drafter"}
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - shapes.keys())]
    problems += [f"{name}: unknown" for name in sorted(shapes.keys() - wanted.keys())]
    problems += [
        f"{name}: shape {list(shapes[name])}, expected {list(wanted[name])}"
        for name in sorted(wanted.keys() & shapes.keys())
        if shapes[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError(
            f"{source / DRAFTER_FILE} holds no drafter of {recipe.name}", tuple(problems)
        )


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")

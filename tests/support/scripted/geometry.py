"""The script: vocabulary, tables and drafter behaviour, from the config.json of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flare_ray.errors import CheckpointError
from flare_ray.recipes.declaration import TensorSpec

FAR = -1.0e4
"""Logit of every other token in a one-hot row: probability exactly 0 at any temperature used."""


@dataclass(frozen=True)
class Script:
    """What the scripted target and drafter play.

    Attributes:
        order: 1 = the row is chosen by the last token, 2 = by the last two.
        next_tokens: one-hot table, next token by row; () = random rows.
        seed, spread: random rows: logits are normal with this standard deviation.
        nan_tokens: tokens whose row holds one NaN (of order 1).
        dead_tokens: tokens whose row is -inf throughout.
        drafter: "table" = the target's rows scaled by `draft_scale` plus noise of `draft_noise`;
            "list" = draft_tokens by depth; "prefix" = the row's best token for `draft_right`
            depths, its neighbour after them.
    """

    vocab_size: int
    max_context_tokens: int = 4096
    eos_ids: tuple[int, ...] = ()
    num_drafter_layers: int = 1
    order: int = 1
    next_tokens: tuple[int, ...] = ()
    seed: int = 0
    spread: float = 1.5
    nan_tokens: tuple[int, ...] = ()
    dead_tokens: tuple[int, ...] = ()
    drafter: str = "table"
    draft_tokens: tuple[int, ...] = ()
    draft_right: int = 0
    draft_scale: float = 1.0
    draft_noise: float = 0.5

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.vocab_size**self.order

    def table(self) -> Tensor:
        """[num_rows, V] float32 target logits."""
        if self.next_tokens:
            index = torch.tensor(self.next_tokens).repeat(self.num_rows // len(self.next_tokens))
            table = one_hot_logits(index, self.vocab_size)
        else:
            table = self._normal(self.seed) * self.spread
        for token in self.nan_tokens:
            table[token :: self.vocab_size, token] = float("nan")
        for token in self.dead_tokens:
            table[token :: self.vocab_size] = float("-inf")
        return table

    def draft_table(self) -> Tensor:
        """[num_rows, V] float32 proposal logits of the "table" drafter."""
        clean = self.table().nan_to_num(0.0, neginf=0.0)
        return clean * self.draft_scale + self._normal(self.seed + 1) * self.draft_noise

    def _normal(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.num_rows, self.vocab_size, generator=generator)


def one_hot_logits(index: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] that leave only `index` [...]."""
    logits = torch.full((*index.shape, vocab_size), FAR)
    return logits.scatter_(-1, index.unsqueeze(-1), 0.0)


def geometry(config: Mapping[str, Any]) -> Script:
    """The script of a config.json."""
    if config.get("model_type") != "scripted" or "script" not in config:
        raise CheckpointError("no scripted checkpoint: model_type 'scripted' with a script needed")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in config["script"].items()}
    try:
        return Script(**values)
    except TypeError as error:
        raise CheckpointError(f"script: {error}") from error


def manifest(script: Script) -> list[TensorSpec]:
    """A script has no tensors."""
    return []


def write_checkpoint(folder: Path, script: Script) -> Path:
    """Make `folder` a checkpoint that `EngineConfig(recipe=DOTTED)` loads; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["ScriptedForTests"],
        "model_type": "scripted",
        "script": {name: getattr(script, name) for name in script.__dataclass_fields__},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

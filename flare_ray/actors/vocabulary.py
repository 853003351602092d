"""The bytes of an engine's tokens, for stops (contract: K2) and grammars (K1)."""

from __future__ import annotations

import json
from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.controller.grammar.token_bytes import token_bytes
from flare_ray.recipes.registry import find_recipe


def engine_token_bytes(config: EngineConfig, manifest: PreparedManifest) -> list[bytes]:
    """Bytes by token id of the checkpoint's tokenizer, as long as the model's vocabulary.

    Raises:
        CheckpointError: the tokenizer is missing, malformed, or larger than the vocabulary.
    """
    path = Path(config.checkpoint) / "tokenizer.json"
    return token_bytes(path, vocab_size=manifest.vocab_size)


def grammar_token_bytes(config: EngineConfig, manifest: PreparedManifest) -> list[bytes]:
    """As `engine_token_bytes`, but that tags of the chat format have their text even where they are
    special tokens: a grammar speaks of them.

    Raises:
        CheckpointError: as there.
    """
    table = engine_token_bytes(config, manifest)
    folder = Path(config.checkpoint)
    recipe = find_recipe(json.loads((folder / "config.json").read_bytes()), name=config.recipe)
    tags = frozenset(recipe.chat.tags)
    document = json.loads((folder / "tokenizer.json").read_bytes())
    for entry in document["added_tokens"] or ():
        if entry["content"] in tags:
            table[entry["id"]] = entry["content"].encode()
    return table

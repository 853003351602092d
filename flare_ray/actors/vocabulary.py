"""The bytes of an engine's tokens, for the controller's stop matching (contract: K2)."""

from __future__ import annotations

from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.controller.grammar.token_bytes import token_bytes


def engine_token_bytes(config: EngineConfig, manifest: PreparedManifest) -> list[bytes]:
    """Bytes by token id of the checkpoint's tokenizer, as long as the model's vocabulary.

    Raises:
        CheckpointError: the tokenizer is missing, malformed, or larger than the vocabulary.
    """
    path = Path(config.checkpoint) / "tokenizer.json"
    return token_bytes(path, vocab_size=manifest.vocab_size)

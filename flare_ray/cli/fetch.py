"""`flare-ray fetch`: a checkpoint from the hub, resumed file by file, every byte verified.

`flare-weights.json` is written last and says that the folder is whole: engines on other nodes may
wait for it. It holds each file's size and checksum, so that a folder can be verified again without
the hub. Only what the loader reads is fetched: weights, configuration and tokeniser of the top
folder; never code.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from flare_ray.errors import CapacityError, CheckpointError, ConfigError

MANIFEST_NAME = "flare-weights.json"
WANTED_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")
READ_BYTES = 16 << 20
TRANSPORTS = ("httpx", "httpx2")
POLL_S = 5.0
GIB = 1 << 30
SPARE_BYTES = 256 << 20
"""Room that a volume keeps beside the files: the hub's own records of partial downloads."""

Say = Callable[[str], None]


class FileFact(msgspec.Struct, frozen=True):
    """One file as the hub declares it: its SHA-256 or, for small ones, its git blob id."""

    name: str
    size: int
    sha256: str = ""
    git_sha1: str = ""


class WeightsManifest(msgspec.Struct, frozen=True):
    """What a whole folder holds; written after everything in it was verified."""

    repository: str
    revision: str
    commit: str
    files: tuple[FileFact, ...]


def fetch(repository: str, folder: Path, *, revision: str, say: Say) -> WeightsManifest:
    """Download what is missing, verify everything, and mark the folder as whole.

    Args:
        repository: ORG/NAME; the hub's address and token come from HF_ENDPOINT and HF_TOKEN.
        folder: created if need be; whole files of an earlier run are kept. A lost connection is
            continued inside its file; a file in which the process was killed starts over, since
            the hub's client writes to a name of its own in each process.
        revision: commit, tag or branch.
        say: takes one line of progress.
    Raises:
        ConfigError: the hub cannot be reached, or refuses.
        CapacityError: the volume is too small.
        CheckpointError: a file differs from what the hub declares; it is removed.
    """
    commit, files = _declared(repository, revision)
    before = read_manifest(folder)
    same = before is not None and (before.commit, before.files) == (commit, files)
    if before is not None and same and not wrong_sizes(folder, files):
        say(f"{folder}: {repository} at {commit} is complete")
        return before
    # From here on the folder is not whole: whoever waits for it must not start.
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    # Nobody continues or removes what a killed run had begun.
    for begun in folder.glob(".cache/huggingface/**/*.incomplete"):
        begun.unlink()
    _require_room(folder, files)
    total = sum(file.size for file in files)
    say(f"{repository} at {commit}: {len(files)} files, {total / GIB:.2f} GiB, into {folder}")
    _download(repository, folder, commit, files)
    verify_files(folder, files, say=say)
    manifest = WeightsManifest(repository, revision, commit, files)
    write_manifest(folder, manifest)
    say(f"{folder}: complete and verified")
    return manifest


def verify(repository: str, folder: Path, *, revision: str, say: Say) -> None:
    """Compare a whole folder with its own manifest, without the hub.

    Raises:
        CheckpointError: it is of something else, or not whole, or a file differs (and is removed).
    """
    problem = folder_problem(repository, folder, revision=revision)
    manifest = read_manifest(folder)
    if problem or manifest is None:
        raise CheckpointError(problem)
    try:
        verify_files(folder, manifest.files, say=say)
    except CheckpointError:
        (folder / MANIFEST_NAME).unlink()
        raise


def wait(repository: str, folder: Path, *, revision: str, limit_s: float, say: Say) -> None:
    """Return once another process has fetched the folder.

    Raises:
        CheckpointError: it is not whole after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    told = ""
    while problem := folder_problem(repository, folder, revision=revision):
        if time.monotonic() >= deadline:
            raise CheckpointError(f"{problem}, after {limit_s:g} s; look at what fetches it")
        if problem != told:
            say(f"waiting: {problem}")
            told = problem
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    say(f"{folder}: complete")


def folder_problem(repository: str, folder: Path, *, revision: str) -> str:
    """Why the folder is not the whole checkpoint that is asked for, "" if it is. Sizes only."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder} has no {MANIFEST_NAME}: it was not fetched, or not to the end"
    if manifest.repository != repository or revision not in (manifest.revision, manifest.commit):
        return (
            f"{folder} holds {manifest.repository} at {manifest.revision}, wanted is {repository} "
            f"at {revision}"
        )
    if wrong := wrong_sizes(folder, manifest.files):
        return f"{folder}: {', '.join(wrong)} missing or of another size"
    return ""


def read_manifest(folder: Path) -> WeightsManifest | None:
    """The folder's manifest, None where there is none.

    Raises:
        CheckpointError: there is one that cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=WeightsManifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove it, fetch again") from error


def write_manifest(folder: Path, manifest: WeightsManifest) -> None:
    """Mark a folder as whole; at once, so that nobody reads half a manifest."""
    partial = folder / f"{MANIFEST_NAME}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    partial.replace(folder / MANIFEST_NAME)


def wrong_sizes(folder: Path, files: Iterable[FileFact]) -> list[str]:
    """Names of files that are missing or of another size."""
    found = {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}
    return [file.name for file in files if found.get(file.name) != file.size]


def verify_files(folder: Path, files: Iterable[FileFact], *, say: Say) -> None:
    """Compare sizes and checksums.

    Raises:
        CheckpointError: naming every file that differs; these are removed, so that another run
            fetches them again.
    """
    problems = []
    for file in files:
        path = folder / file.name
        problem = _file_problem(path, file)
        if problem:
            problems.append(problem)
            path.unlink(missing_ok=True)
        else:
            say(f"verified {file.name}")
    if problems:
        raise CheckpointError(
            "; ".join(problems) + "; removed what differs: run the same command again"
        )


def _file_problem(path: Path, file: FileFact) -> str:
    if not path.is_file():
        return f"{file.name} is missing"
    size = path.stat().st_size
    if size != file.size:
        return f"{file.name} has {size} bytes, expected {file.size}"
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
    expected = file.sha256 or file.git_sha1
    if digest.hexdigest() != expected:
        return f"{file.name} has the {digest.name} {digest.hexdigest()}, expected {expected}"
    return ""


def _declared(repository: str, revision: str) -> tuple[str, tuple[FileFact, ...]]:
    """The revision's commit, and its files that are wanted."""
    from huggingface_hub import HfApi

    with _hub_errors(repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = []
    for entry in info.siblings or []:
        name = entry.rfilename
        if "/" in name or not name.endswith(WANTED_SUFFIXES) or name == MANIFEST_NAME:
            continue
        sha256 = entry.lfs.sha256 if entry.lfs else ""
        fact = FileFact(name, int(entry.size or 0), sha256, "" if sha256 else entry.blob_id or "")
        if not (fact.sha256 or fact.git_sha1):
            raise ConfigError(f"{repository}: the hub gives no checksum of {name}")
        files.append(fact)
    if not any(file.name.endswith(".safetensors") for file in files):
        raise ConfigError(f"{repository} at {revision} has no *.safetensors in its top folder")
    return str(info.sha), tuple(sorted(files, key=lambda file: file.name))


def _download(repository: str, folder: Path, commit: str, files: Iterable[FileFact]) -> None:
    from huggingface_hub import snapshot_download

    with _hub_errors(repository, commit):
        snapshot_download(
            repository,
            revision=commit,
            local_dir=folder,
            allow_patterns=[file.name for file in files],
        )


class _hub_errors:
    """Whatever the hub's client raises, as a ConfigError that says what to change."""

    def __init__(self, repository: str, revision: str) -> None:
        self._what = f"{repository} at {revision}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        # The hub's client has changed its transport before; the loaded one raises its own errors.
        loaded = [sys.modules[name] for name in TRANSPORTS if name in sys.modules]
        known: tuple[type[BaseException], ...] = (
            *(HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError),
            *(module.HTTPError for module in loaded),
        )
        if isinstance(error, known):
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ConfigError(
                f"{self._what} cannot be fetched: {first}; check the name, the revision, "
                "HF_ENDPOINT, and HF_TOKEN for a private repository; another run continues"
            ) from error


def _require_room(folder: Path, files: Iterable[FileFact]) -> None:
    partial = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = sum(file.size for file in files) + SPARE_BYTES - partial
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(
            f"{folder} needs {needed / GIB:.2f} GiB more, its volume has {free / GIB:.2f} GiB "
            "free: enlarge the volume or free space"
        )

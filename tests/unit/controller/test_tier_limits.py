"""What a lower tier refuses at the start, and which files it takes over (contract: M7)."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

import msgspec
import pytest

from flare_ray.config import PrefixCacheConfig
from flare_ray.contracts.tiers import manifest_path, part_path
from flare_ray.controller.cache import _check_room
from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.disk import (
    FORMAT_VERSION,
    DiskDirectory,
    DiskManifest,
    PartFile,
    sealed,
)
from flare_ray.controller.paging.identity import checkpoint_identity
from flare_ray.controller.paging.tiers import HEADER_ALLOWANCE
from flare_ray.errors import ConfigError

LEAST = 5000
LABEL = "a" * 64


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        ({"host_bytes": LEAST - 1}, "host_bytes"),
        (
            {"host_bytes": LEAST, "disk_path": "p", "disk_bytes": LEAST + HEADER_ALLOWANCE - 1},
            "disk_bytes",
        ),
    ],
)
def test_tier_without_room_for_one_prefix_is_refused_by_name(cache, named):
    with pytest.raises(ConfigError, match=named):
        _check_room(PrefixCacheConfig(**cache), LEAST)


@pytest.mark.parametrize(
    "cache",
    [
        {"host_bytes": LEAST},
        {"host_bytes": 1, "enabled": False},
        {"disk_bytes": 1},
        {"host_bytes": LEAST, "disk_path": "p", "disk_bytes": LEAST + HEADER_ALLOWANCE},
    ],
)
def test_tier_with_room_for_one_prefix_or_none_at_all_is_taken(cache):
    _check_room(PrefixCacheConfig(**cache), LEAST)


def refuse(*_args: object, **_named: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("step", ["mkdir", "lock", "clean", "list"])
def test_directory_that_cannot_be_used_is_refused_by_name_and_left_alone(
    tmp_path, monkeypatch, step
):
    folder = tmp_path / "engine-0"
    folder.mkdir()
    left = folder / ("0" * 40 + ".r0.part.new")
    left.touch()
    target = {
        "mkdir": (Path, "mkdir"),
        "lock": (fcntl, "flock"),
        "clean": (Path, "unlink"),
        "list": (os, "listdir"),
    }[step]
    before = open_files()
    with monkeypatch.context() as patched:
        patched.setattr(*target, refuse)
        with pytest.raises(ConfigError, match=r"disk_path: .*Read-only"):
            DiskDirectory.open(str(tmp_path), LABEL, 1)
    assert open_files() == before and left.exists()
    # nobody holds the lock
    directory = DiskDirectory.open(str(tmp_path), LABEL, 1)
    assert directory.folder == folder and not left.exists()
    directory.close()


def test_path_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="disk_path"):
        DiskDirectory.open(str(tmp_path / "file"), LABEL, 1)


RANKS = 2
PART = b"state of a rank"
TOKENS = tuple(range(70))


def manifest() -> DiskManifest:
    chain = TokenChain(TOKENS, "")
    return DiskManifest(
        version=FORMAT_VERSION,
        label=LABEL,
        tokens=len(TOKENS),
        digests=tuple(chain.digest(page).hex() for page in range(2)),
        tail=TOKENS[64:],
        parts=(PartFile(len(PART), "c" * 64),) * RANKS,
    )


def leave(folder: Path, content: bytes, number: int = 0) -> str:
    """Files of a snapshot as an engine of two ranks would leave them; their stem."""
    folder.mkdir(exist_ok=True)
    stem = str(folder / f"{number:040x}")
    for rank in range(RANKS):
        Path(part_path(stem, rank)).write_bytes(PART)
    Path(manifest_path(stem)).write_bytes(content)
    return stem


def test_whole_snapshot_is_taken_over(tmp_path):
    stem = leave(tmp_path / "engine-0", sealed(manifest()))
    directory = DiskDirectory.open(str(tmp_path), LABEL, RANKS)
    [found] = directory.found
    assert (found.stem, found.tokens, directory.rejected) == (stem, 70, 0)
    assert TokenChain((*TOKENS, 1), "").holds(found.trace.key(70), 70)
    directory.close()


def changed(**fields: object) -> bytes:
    return sealed(msgspec.structs.replace(manifest(), **fields))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (changed(version=FORMAT_VERSION + 1), "version"),
        (changed(label="b" * 64), "belongs to another"),
        (changed(parts=(PartFile(len(PART), "c"),)), "1 ranks wrote it"),
        (changed(parts=(PartFile(len(PART) + 1, "c"),) * RANKS), "bytes of"),
        (changed(tokens=71), "do not fit"),
        (sealed(manifest()).replace(LABEL.encode(), b"b" * 64), "checksum"),
        (sealed(manifest())[:-9], "truncated|Expected|malformed"),
        (b"", "truncated|malformed"),
        (changed(tokens=-64, digests=(), tail=()), "do not fit|length"),
        (changed(digests=("no number", "")), "hexadecimal"),
        (changed(digests=("ab", "cd")), "length"),
        (b'{"checksum": "", "manifest": ' + b"[" * 100_000, "nested"),
    ],
)
def test_foreign_or_damaged_manifest_is_reported_once_and_goes_with_its_parts(
    tmp_path, caplog, content, reason
):
    folder = tmp_path / "engine-0"
    leave(folder, content)
    whole = leave(folder, sealed(manifest()), 1)
    (folder / "notes.txt").touch()
    with caplog.at_level(logging.WARNING):
        directory = DiskDirectory.open(str(tmp_path), LABEL, RANKS)
    directory.close()
    assert [found.stem for found in directory.found] == [whole] and directory.rejected == 1
    [message] = caplog.messages
    assert any(word in message for word in reason.split("|")), message
    parts = [Path(part_path(whole, rank)).name for rank in range(RANKS)]
    kept = {"lock", "notes.txt", Path(manifest_path(whole)).name, *parts}
    assert {path.name for path in folder.iterdir()} == kept
    caplog.clear()
    again = DiskDirectory.open(str(tmp_path), LABEL, RANKS)
    again.close()
    assert again.rejected == 0 and not caplog.messages


def test_what_only_has_the_name_of_a_file_of_ours_is_neither_read_nor_removed(tmp_path):
    folder = tmp_path / "engine-0"
    whole = leave(folder, sealed(manifest()))
    (folder / f"{1:040x}.json").mkdir()
    os.mkfifo(folder / f"{2:040x}.json")
    (folder / f"{3:040x}.json").symlink_to(tmp_path / "nowhere")
    before = set(os.listdir(folder))
    directory = DiskDirectory.open(str(tmp_path), LABEL, RANKS)
    directory.close()
    assert [found.stem for found in directory.found] == [whole] and directory.rejected == 0
    assert set(os.listdir(folder)) == before | {"lock"}


def test_identity_of_a_checkpoint_is_that_of_all_its_content(tmp_path):
    """The tokenizer's too: which rows of an n-gram table a state holds follows from it."""
    names = ("config.json", "tokenizer.json", "model.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(b"content")
    (tmp_path / "README.md").write_bytes(b"words")
    found = {checkpoint_identity(tmp_path)}
    for name in names:
        (tmp_path / name).write_bytes(b"contemt")
        found.add(checkpoint_identity(tmp_path))
    assert len(found) == len(names) + 1
    (tmp_path / "README.md").write_bytes(b"other words")
    assert checkpoint_identity(tmp_path) in found

"""What a lower tier refuses at the start, and what damage at run time costs (contract: M7)."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from flare_ray.config import PrefixCacheConfig
from flare_ray.controller.cache import _check_room
from flare_ray.controller.paging.disk import DiskDirectory
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

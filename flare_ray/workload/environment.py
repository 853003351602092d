"""Where a measurement ran: what figures depend on, without names or addresses of hosts."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flare_ray._version import __version__


def describe(command: Sequence[str]) -> dict[str, str]:
    """Environment of a run that starts now with this command."""
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit_of(Path(__file__).parent),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def commit_of(folder: Path, *, ignored: Sequence[str] = ()) -> str:
    """Commit of the checkout around a folder, with ``-dirty`` when tracked files differ.

    Args:
        ignored: paths below the folder whose changes do not count.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return "unknown (not a git checkout)"
    excluded = [f":!{path}" for path in ignored]
    # ":/" is the checkout's root: "." would see changes below the folder only.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """Processor model as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

"""Kill -9 while snapshots are written: then each is whole and exact, or gone (contract: M7)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys, pathlib\n"
    "from tests.support.tier_writer import kill_repeatedly\n"
    "print(kill_repeatedly(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))\n"
)


def kill_writers(path: Path, kills: int, seed: int) -> int:
    """Snapshots found after all kills; in a process of its own, which forks before any thread."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(kills), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30 + 5 * kills,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def test_ten_kills_leave_whole_snapshots_or_none(tmp_path, random_seed):
    assert kill_writers(tmp_path, 10, random_seed) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_kills_leave_whole_snapshots_or_none(tmp_path, random_seed):
    assert kill_writers(tmp_path, 200, random_seed) > 200

"""Kernels that were compiled without a device are those that a start on one asks for.

Each step is a process of its own: Triton keeps its driver and its choice of interpreting for good.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.sources import ROOT
from tests.support.served_glm import served_glm

LIMIT_S = 600
SOURCES = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
SETTINGS = "dict(concurrency=2, prefill_tokens=32, speculation=dict(widths=(1, 3)))"
AHEAD = f"""
import sys
from pathlib import Path
from flare_ray.device.ahead import compile_ahead
from tests.gpu.captured import config_of
settings = {SETTINGS} | eval(sys.argv[3])
config = config_of(Path(sys.argv[1]), **settings)
print(compile_ahead(config, Path(sys.argv[2]), experts="bfloat16"))
"""
START = f"""
import sys
from pathlib import Path
from tests.gpu.captured import rank_of
rank_of(Path(sys.argv[1]), **{SETTINGS})
"""

pytestmark = [
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton, which the cuda extra has"
    ),
]


def run(script: str, *arguments: object, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": SOURCES, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def kernels(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


def compiled(checkpoint: Path, folder: Path, settings: str = "{}") -> set[Path]:
    """Kernels after compiling for the micro checkpoint, with no device in sight."""
    told = run(AHEAD, checkpoint, folder, settings, CUDA_VISIBLE_DEVICES="")
    assert int(told.split()[-1]) == len(kernels(folder))
    return kernels(folder)


@pytest.mark.slow
def test_kernels_are_compiled_without_a_device_and_found_again(tmp_path):
    checkpoint, folder = served_glm(tmp_path / "glm"), tmp_path / "kernels"
    first = compiled(checkpoint, folder)
    assert first
    assert compiled(checkpoint, folder) == first
    # Negative control: settings that need another specialisation add to them.
    assert compiled(checkpoint, folder, "dict(concurrency=3)") > first


@pytest.mark.gpu
def test_start_compiles_nothing_that_was_compiled_ahead(tmp_path):
    checkpoint, folder = served_glm(tmp_path / "glm"), tmp_path / "kernels"
    first = compiled(checkpoint, folder)
    run(START, checkpoint, TRITON_CACHE_DIR=str(folder))
    assert kernels(folder) == first

"""Pin what the images install: `python deployments/images/lock.py` writes both lock files anew.

requirements.txt       the project's dependencies without torch, for both images
requirements-cuda.txt  torch, its CUDA libraries and the kernel packages, for the CUDA image only

Every package has its version and the hashes of its files; pip refuses anything else. Needs `uv`,
which resolves from metadata alone (torch's CUDA build would be several gigabytes).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"
BUILD = ("setuptools==84.0.0",)
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"
HEAD = "# Written by deployments/images/lock.py. Linux x86_64, Python {python}.\n"
CUDA_ONLY = re.compile(r"(torch|triton|nvidia-|cuda-|flashinfer|fla-|apache-tvm)")


def main() -> None:
    """Write both files."""
    base = entries(resolve())
    cuda = entries(resolve("cuda"))
    common = {name for name in base if not CUDA_ONLY.match(name)}
    write(HERE / "requirements.txt", {name: cuda[name] for name in common})
    write(HERE / "requirements-cuda.txt", {n: cuda[n] for n in cuda if n not in common})


def resolve(*extras: str) -> str:
    """The closure of the project's dependencies, with hashes."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write("\n".join((TORCH, *BUILD)))
        wanted.flush()
        command = [
            *("uv", "pip", "compile", str(ROOT / "pyproject.toml"), wanted.name),
            *(f"--extra={extra}" for extra in extras),
            *("--python-version", PYTHON, "--python-platform", PLATFORM),
            *("--generate-hashes", "--no-header", "--no-annotate", "--quiet"),
        ]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def entries(text: str) -> dict[str, str]:
    """Package -> its lines of a lock file."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        found[re.split(r"[=\s\[]", block, maxsplit=1)[0]] = block
    return found


def write(path: Path, packages: dict[str, str]) -> None:
    """Write a lock file."""
    lines = [packages[name] for name in sorted(packages)]
    path.write_text(HEAD.format(python=PYTHON) + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(packages)} packages", file=sys.stderr)


if __name__ == "__main__":
    main()

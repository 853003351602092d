"""Writes the frozen workload: `python -m benchmarks.workload.freeze`.

Everything follows from seeds and the texts of the package; running it twice writes equal bytes. Run
it again when the demo gets another tokeniser or template: items stay, its ids are added.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.results import ROOT
from flare_ray.workload.frozen import FOLDER
from flare_ray.workload.source import build_files

CHECKPOINTS = (ROOT / "deployments" / "demo" / "glm",)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all files of the version."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in build_files(CHECKPOINTS, kept=options.out).items():
        (options.out / name).write_bytes(data)
        print(f"{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()

"""``python -m benchmarks.summary``: every target of every result file and its state.

Exits with 1 if a target is missed or a file is not a valid result, so a script can ask.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.support.results import RESULTS, BenchmarkResult, read_result, targets_table

PIPED_WIDTH = 160
"""Columns of the table where no terminal says its own: no name is cut."""


def summarise(folder: Path, console: Console) -> int:
    """Print the table of a results folder; returns the process's exit status."""
    results: list[BenchmarkResult] = []
    broken: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(read_result(path))
        except ValueError as error:
            broken.append(str(error))
    if not results and not broken:
        console.print("No result files yet; each benchmark writes one.")
        return 0
    console.print(targets_table(results))
    targets = [target for result in results for target in result.targets]
    met = sum(target.met for target in targets)
    console.print(f"{met} of {len(targets)} targets met in {len(results)} result files")
    for message in broken:
        console.print(f"[red]not a valid result:[/red] {message}")
    return int(met < len(targets) or bool(broken))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of result files")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir() and options.folder != RESULTS:
        parser.error(f"no such folder: {options.folder}")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    return summarise(options.folder, console)


if __name__ == "__main__":
    raise SystemExit(main())

"""`flare-ray workload`: the frozen workload against running servers, reports, comparisons.

One frozen record per command, as in `main`. A run is a folder: every observation in it, one line
each, appended as it happens; started again with the same options it goes on where it was stopped.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flare_ray.errors import ConfigError

EXIT_REGRESSION = 1

_Run = Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")]
_Items = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a frozen workload, or a file that `workload import` wrote; otherwise the "
        "package's own.",
        metavar="PATH",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ListWorkload:
    """Verify a workload's files and show its items by category."""

    items: _Items = None

    def run(self) -> int:
        """Print counts."""
        from flare_ray.workload.source import load_workload

        found = load_workload(self.items)
        typer.echo(f"{found.name}, SHA-256 {found.digest}")
        for category in dict.fromkeys(item.category for item in found.items):
            rows = [item for item in found.items if item.category == category]
            sessions = len({item.session for item in rows})
            checked = sum(item.expected.check != "none" for item in rows)
            licences = ", ".join(sorted({item.source.licence for item in rows}))
            typer.echo(
                f"{category:16s} {len(rows):5d} items in {sessions} conversations, {checked} with "
                f"a checked answer; {licences}"
            )
        return 0


@dataclass(frozen=True, kw_only=True)
class ImportPrompts:
    """Turn an external prompt file (a JSON object a line: {"turns": [text, ...]}) into items."""

    file: Annotated[Path, typer.Argument(help="Prompt file.", metavar="FILE")]
    out: Annotated[Path, typer.Option(help="File of items to write.", metavar="FILE")]
    category: Annotated[str, typer.Option(help="Category of all of them.")]
    licence: Annotated[str, typer.Option(help="Terms of the file, kept with every item.")]

    def run(self) -> int:
        """Write the items."""
        from flare_ray.workload.items import encode_items
        from flare_ray.workload.source import import_prompts

        items = import_prompts(self.file, category=self.category, licence=self.licence)
        self.out.write_bytes(encode_items(items))
        typer.echo(f"{self.out}: {len(items)} items")
        return 0


@dataclass(frozen=True, kw_only=True)
class RunWorkload:
    """Run items against one or several OpenAI-compatible servers, in turn and in pairs."""

    url: Annotated[
        list[str],
        typer.Option(
            help="An arm: its name and its server's address; give several to compare them.",
            metavar="NAME=URL",
        ),
    ]
    out: Annotated[Path, typer.Option(help="Folder of the run.", metavar="RUN")]
    items: _Items = None
    categories: Annotated[
        str | None, typer.Option(help="Comma-separated; otherwise all that the workload has.")
    ] = None
    sessions: Annotated[int, typer.Option(min=1, help="Conversations of each category.")] = 8
    warm: Annotated[int, typer.Option(min=0, help="Further ones to warm up with, not counted.")] = 1
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all of them.")] = 1
    chunk: Annotated[
        int, typer.Option(min=1, help="Conversations that an arm runs before the next one's turn.")
    ] = 4
    arrivals: Annotated[
        str,
        typer.Option(help="closed:N, poisson:RATE, bursts:SIZE/PERIOD_S or trace:FILE (seconds)."),
    ] = "closed:1"
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Upper bound of output budgets; 0 = the items' own.")
    ] = 0
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Otherwise the server's default.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run to the budget.")] = False
    reproducible: Annotated[
        bool | None,
        typer.Option("--reproducible/--plain", help="Sent as such; otherwise not sent."),
    ] = None
    salted: Annotated[
        bool,
        typer.Option(
            "--salted", help="Send a cache_salt per block: every pass starts equally cold."
        ),
    ] = False
    predict: Annotated[
        list[str] | None,
        typer.Option(help="Arm whose requests carry the items' predictions.", metavar="NAME"),
    ] = None
    model: Annotated[str | None, typer.Option(help="Otherwise each server's first.")] = None
    settle_s: Annotated[
        float, typer.Option(min=0, help="Pause before counters of a server are read.")
    ] = 0.0

    def run(self) -> int:
        """Run every block that the folder does not hold yet."""
        import msgspec

        from flare_ray.workload.environment import describe
        from flare_ray.workload.records import Header, Journal
        from flare_ray.workload.runner import Runner
        from flare_ray.workload.source import load_workload

        workload = load_workload(self.items)
        settings = self._settings(dict.fromkeys(item.category for item in workload.items))
        arms = self._arms()
        header = Header(
            workload=workload.name,
            digest=workload.digest,
            arms=tuple(arm.name for arm in arms),
            settings=msgspec.to_builtins(settings),
            environment=describe(["flare-ray", *sys.argv[1:]]),
        )
        with Journal(self.out, header) as journal, _progress() as on_block:
            Runner(journal, settings, tokens={}, on_block=on_block).run(arms, workload.items)
        typer.echo(f"{self.out}: done; `flare-ray workload report {self.out}` writes the report")
        return 0

    def _settings(self, known: Collection[str]) -> Any:
        """`known` = the workload's categories, in its order."""
        from flare_ray.workload.arrivals import parse_arrivals
        from flare_ray.workload.runner import RunSettings

        chosen = self.categories.split(",") if self.categories else list(known)
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise ConfigError(f"the workload has {list(known)}, not {unknown}")
        return RunSettings(
            categories=tuple(chosen),
            arrivals=parse_arrivals(self.arrivals),
            sessions=self.sessions,
            warm=self.warm,
            repeats=self.repeats,
            chunk=self.chunk,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            reproducible=self.reproducible,
            salted=self.salted,
        )

    def _arms(self) -> list[Any]:
        from flare_ray.workload.http import HttpEndpoint
        from flare_ray.workload.runner import Arm

        arms, predicting = [], set(self.predict or ())
        for given in self.url:
            name, equals, address = given.partition("=")
            if not equals or not name or not address:
                raise ConfigError(f"--url {given!r}: expected NAME=URL")
            endpoint = HttpEndpoint(address, model=self.model, settle_s=self.settle_s)
            arms.append(Arm(name, endpoint, address, predicts=name in predicting))
        names = [arm.name for arm in arms]
        if len(set(names)) < len(names) or predicting - set(names):
            raise ConfigError(f"arms {names} must differ, and --predict name some of them")
        return arms


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of finished blocks on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("blocks")

        def on_block(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_block


@dataclass(frozen=True, kw_only=True)
class ReportWorkload:
    """Write the report of a run: one self-contained HTML page, and Markdown."""

    run_folder: _Run
    further: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Another run, for points of the frontier.", metavar="RUN"),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder; otherwise the run's own.", metavar="FOLDER")
    ] = None
    no_plots: Annotated[
        bool, typer.Option("--no-plots", help="Tables only; needs no matplotlib.")
    ] = False

    def run(self) -> int:
        """Write both files."""
        from flare_ray.workload.report import write_report
        from flare_ray.workload.summary import read_run

        runs = [read_run(folder) for folder in (self.run_folder, *(self.further or ()))]
        out = self.out or self.run_folder
        for path in write_report(runs, out, with_plots=not self.no_plots):
            typer.echo(str(path))
        return 0


@dataclass(frozen=True, kw_only=True)
class CompareWorkload:
    """Compare two runs of equal items, regressions first; with --gate, status 1 where an arm became
    slower than that as a whole interval, or requests fail that did not."""

    old: Annotated[Path, typer.Argument(help="Folder of the earlier run.", metavar="OLD")]
    new: Annotated[Path, typer.Argument(help="Folder of the later run.", metavar="NEW")]
    reference: Annotated[
        str | None,
        typer.Option(
            help="Arm that each run is divided by first, so that machines of different speed "
            "compare.",
            metavar="ARM",
        ),
    ] = None
    gate: Annotated[
        float | None, typer.Option(min=0, help="Least ratio of new over old.", metavar="RATIO")
    ] = None

    def run(self) -> int:
        """Print the table; judge it where a gate is given."""
        from flare_ray.workload.compare import compare
        from flare_ray.workload.report import comparison_table
        from flare_ray.workload.summary import read_run

        found = compare(read_run(self.old), read_run(self.new), reference=self.reference)
        typer.echo(comparison_table(found).markdown)
        failures = found.failures(self.gate) if self.gate is not None else []
        for line in failures:
            typer.echo(f"gate: {line}", err=True)
        return EXIT_REGRESSION if failures else 0


COMMANDS = {
    "list": ListWorkload,
    "import": ImportPrompts,
    "run": RunWorkload,
    "report": ReportWorkload,
    "compare": CompareWorkload,
}

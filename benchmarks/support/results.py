"""The result file of a benchmark: what was measured, where, how, and whether its targets were met.

A file is written once by the run that measured it and checked whenever it is read: a target's
``met`` must follow from the metric and the bound beside it, so neither can be edited alone.
"""

import json
import math
import operator as op
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from flare_ray.workload.environment import commit_of, cpu_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# contract: B2. Traces and per-request observations stay outside the repository.
MAX_RESULT_BYTES = 256 * 1024
VERSIONED_PACKAGES = ("torch", "ray", "transformers", "flashinfer-python", "fla-core", "triton")

Operator = Literal[">=", "<=", ">", "<", "=="]
_COMPARE: dict[Operator, Callable[[float, float], bool]] = {
    ">=": op.ge,
    "<=": op.le,
    ">": op.gt,
    "<": op.lt,
    "==": op.eq,
}


class Bound(BaseModel, frozen=True, extra="forbid"):
    """A target before its measurement: the metric's dotted path, the comparison and its bound."""

    metric: str = Field(min_length=1, description="Dotted path into the metrics, e.g. b1.ratio.")
    operator: Operator = Field(description="How the metric is compared with the value.")
    value: float = Field(allow_inf_nan=False, description="The bound, in the metric's unit.")

    def is_met_by(self, metrics: dict[str, JsonValue]) -> bool:
        """Compare the metric at ``self.metric`` with the bound.

        Raises:
            ValueError: if no finite number stands at that path.
        """
        return _COMPARE[self.operator](metric_at(metrics, self.metric), self.value)


class Target(Bound, frozen=True, extra="forbid"):
    """A bound together with the verdict on it."""

    met: bool = Field(description="Whether the metric satisfies the bound.")


class Machine(BaseModel, frozen=True, extra="forbid"):
    """What the figures depend on, without names or addresses of hosts."""

    cpu: str = Field(description="Processor model as the kernel reports it.")
    cores: int = Field(ge=1, description="Logical cores that this process may use.")
    memory_gib: float = Field(gt=0, description="Physical memory.")
    accelerators: list[str] = Field(description="Names of the visible CUDA devices.")


class BenchmarkResult(BaseModel, frozen=True, extra="forbid"):
    """One result file."""

    name: str = Field(pattern=r"^[a-z0-9_]+$", description="Stem of the file.")
    date: datetime = Field(description="End of the measurement, UTC.")
    commit: str = Field(description="Commit measured; '-dirty' marks local changes.")
    machine: Machine = Field(description="Where it ran.")
    versions: dict[str, str] = Field(description="Python and the libraries that matter.")
    command: str = Field(description="Command that reproduces the run from the checkout's root.")
    metrics: dict[str, JsonValue] = Field(description="Numbers by name; nested for tables.")
    targets: list[Target] = Field(description="What had to be reached; empty if nothing had to.")

    @model_validator(mode="after")
    def _verdicts_follow_from_metrics(self) -> Self:
        for target in self.targets:
            if target.met != target.is_met_by(self.metrics):
                raise ValueError(
                    f"target {target.metric} {target.operator} {target.value} says "
                    f"met={target.met}, but the metric is "
                    f"{metric_at(self.metrics, target.metric)}: run it again"
                )
        return self


def metric_at(metrics: dict[str, JsonValue], path: str) -> float:
    """The finite number at a dotted path.

    Raises:
        ValueError: naming the path and what stands there instead.
    """
    node: JsonValue = metrics
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            raise ValueError(f"no metric {path!r}: {part!r} is not among {_keys(node)}")
        node = node[part]
    if isinstance(node, bool) or not isinstance(node, int | float) or not math.isfinite(node):
        raise ValueError(f"metric {path!r} is {node!r}, expected a finite number")
    return float(node)


def _keys(node: JsonValue) -> str:
    return ", ".join(sorted(node)) if isinstance(node, dict) else repr(node)


def write_result(
    name: str,
    metrics: dict[str, JsonValue],
    bounds: Sequence[Bound] = (),
    *,
    command: Sequence[str] | None = None,
    folder: Path = RESULTS,
) -> BenchmarkResult:
    """Judge the metrics, write ``folder/name.json`` and return what was written.

    Args:
        name: stem of the file; an earlier result of the same name is replaced.
        metrics: numbers by name; nested dictionaries and lists for tables.
        bounds: the targets, each judged here and nowhere else.
        command: words of the reproducing command; by default the module and arguments of this run.
        folder: where the file goes.

    Raises:
        ValueError: if a bound names no finite number, a number is not finite, or the file would
            exceed 256 KiB; nothing is written then.
    """
    result = BenchmarkResult(
        name=name,
        date=datetime.now(UTC).replace(microsecond=0),
        commit=current_commit(),
        machine=describe_machine(),
        versions=describe_versions(),
        command=shlex.join(command if command is not None else running_command()),
        metrics=metrics,
        targets=[Target(**bound.model_dump(), met=bound.is_met_by(metrics)) for bound in bounds],
    )
    text = json.dumps(result.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
    if len(text.encode()) > MAX_RESULT_BYTES:
        raise ValueError(
            f"result {name} has {len(text.encode())} bytes, at most {MAX_RESULT_BYTES}: "
            "keep aggregates here and traces outside the repository"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    # Renamed last: an interrupted run leaves the earlier result whole.
    partial = path.with_suffix(".json.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return result


def read_result(path: Path) -> BenchmarkResult:
    """Read and check one result file.

    Raises:
        ValueError: naming the file and each thing that is wrong with it.
    """
    try:
        result = BenchmarkResult.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if result.name != path.stem:
        raise ValueError(f"{path.name} says its name is {result.name!r}: rename one of them")
    return result


def targets_table(results: Sequence[BenchmarkResult]) -> Table:
    """One row a target, in the order given; results without targets show one row saying so."""
    table = Table(title="Benchmark targets")
    for heading in ("result", "metric", "target", "measured", "state", "commit", "machine"):
        table.add_column(heading, justify="right" if heading == "measured" else "left")
    for result in results:
        where = ", ".join([f"{result.machine.cores} cores", *result.machine.accelerators])
        tail = (result.commit[:12] + ("*" if result.commit.endswith("-dirty") else ""), where)
        if not result.targets:
            table.add_row(result.name, "-", "-", "-", "no target", *tail)
        for target in result.targets:
            measured = metric_at(result.metrics, target.metric)
            state = "[green]met[/green]" if target.met else "[red]MISSED[/red]"
            bound = f"{target.operator} {target.value:g}"
            table.add_row(result.name, target.metric, bound, f"{measured:.4g}", state, *tail)
    return table


def print_result(result: BenchmarkResult, console: Console | None = None) -> None:
    """Print the top-level numbers and the targets of one run."""
    console = console or Console()
    for name, value in result.metrics.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            console.print(f"{name:40s} {value:.6g}")
    console.print(targets_table([result]))


def conclude(
    name: str,
    metrics: dict[str, JsonValue],
    bounds: Sequence[Bound],
    console: Console,
    *,
    official: bool,
) -> int:
    """Write and print the result of an official run; print the metrics of any other.

    Returns:
        The exit status: 1 where an official run missed a target.
    """
    if official:
        result = write_result(name, metrics, bounds)
        print_result(result, console)
        return int(not all(target.met for target in result.targets))
    for metric, value in metrics.items():
        console.print(f"{metric}: {value}", highlight=False, markup=False)
    console.print("not an official run: no result was written")
    return 0


def current_commit() -> str:
    """Commit of the checkout, with ``-dirty`` when tracked files other than results differ."""
    return commit_of(ROOT, ignored=("benchmarks/results",))


def describe_versions() -> dict[str, str]:
    """Python's version and those of the installed packages that figures depend on."""
    versions = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_machine() -> Machine:
    """Processor, usable cores, memory and visible CUDA devices (imports torch to ask for them)."""
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return Machine(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        accelerators=[torch.cuda.get_device_name(index) for index in devices],
    )


def running_command() -> list[str]:
    """Words that run the current module again, from the checkout's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return ["python", *sys.argv]
    return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]

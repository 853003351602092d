"""`flare-ray inspect`: what a checkpoint stores, and whether its recipe can load it, from headers
alone (contract: R5, R10)."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flare_ray.device.weights.budget import format_bytes, rank_shape
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import CheckpointIndex, scan_checkpoint
from flare_ray.device.weights.manifest import ValidatedWeights, check_manifest
from flare_ray.device.weights.quantisation import declared_kv_cache
from flare_ray.device.weights.stored import StoredWeight, distinct_parts
from flare_ray.errors import CheckpointError, ConfigError
from flare_ray.recipes.declaration import Recipe, TensorSpec, resolve
from flare_ray.recipes.registry import find_recipe

MAX_LISTED = 40
"""Problems and notices printed; all of them are in the report."""
WIDTH = 100
GIB = 1 << 30
BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Share:
    """Tensors of one family stored in one format.

    Attributes:
        family: "target", "drafter", or "not loaded" for what the recipe tolerates.
        format: storage format; plain ones by their type.
        tensors: stored tensors, scales included.
        weights: listed tensors; equals `tensors` where the format has no scales.
        params: elements of the listed tensors, unpacked.
        num_bytes: stored bytes, scales included.
    """

    family: str
    format: str
    tensors: int
    weights: int
    params: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Weights of one rank at a TP degree: kept as stored, or all in bfloat16."""

    world_size: int
    stored_bytes: int
    bfloat16_bytes: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What a checkpoint holds.

    Attributes:
        folder: where it lies.
        recipe: the recipe that serves it; "" if none was found.
        num_files: files that hold its tensors.
        num_tensors: stored tensors of all kinds.
        total_bytes: their bytes.
        shares: tensors by family and format, in the manifest's order.
        ranks: weights per rank at each TP degree of the recipe that divides them.
        kv_cache: KV-cache type it declares; "" = none.
        w4a4: listed tensors with an activation scale.
        notices: oddities that are accepted.
        problems: what keeps the engine from loading it; empty = it loads.
    """

    folder: Path
    recipe: str
    num_files: int
    num_tensors: int
    total_bytes: int
    shares: tuple[Share, ...]
    ranks: tuple[RankBytes, ...]
    kv_cache: str
    w4a4: int
    notices: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def text(self) -> str:
        """The report as `render` prints it."""
        return render(self)


def inspect_checkpoint(path: str | Path, *, recipe: str | None = None) -> InspectReport:
    """Compare a checkpoint folder with its recipe, reading headers only.

    Args:
        path: folder with config.json and safetensors files.
        recipe: name of the recipe; None = found from config.json.
    Returns:
        Always a report: whatever is wrong is among its problems.
    """
    index, problems = scan_checkpoint(path)
    found, specs, more = _manifest_of(index, recipe)
    problems = (*problems, *more)
    validated = ValidatedWeights({}, ())
    if found is not None and specs:
        validated, more = check_manifest(index, specs, tolerated_prefixes=found.tolerated_prefixes)
        problems = (*problems, *more)
    kv_cache = declared_kv_cache(index.quantisation)
    notices = (*index.notices, *validated.notices)
    if kv_cache:
        notices += (
            f"a KV cache of type {kv_cache} is declared: the deployment must state another one",
        )
    weights = tuple(validated.weights.values())
    return InspectReport(
        folder=Path(path),
        recipe="" if found is None else found.name,
        num_files=len({tensor.file for tensor in index.tensors.values()}),
        num_tensors=len(index.tensors),
        total_bytes=index.total_bytes,
        shares=_shares(index, weights, found),
        ranks=_ranks(weights, found),
        kv_cache=kv_cache,
        w4a4=sum(weight.quantises_activations for weight in weights),
        notices=notices,
        problems=problems,
    )


def _manifest_of(
    index: CheckpointIndex, name: str | None
) -> tuple[Recipe | None, Sequence[TensorSpec], tuple[str, ...]]:
    """The recipe, its manifest for this checkpoint, and what kept either from being found."""
    if not index.config and name is None:
        return None, (), ()
    try:
        recipe = find_recipe(index.config, name=name)
    except ConfigError as error:
        return None, (), (str(error),)
    try:
        return recipe, resolve(recipe.manifest)(resolve(recipe.geometry)(index.config)), ()
    except CheckpointError as error:
        return recipe, (), error.problems or (str(error),)
    except ConfigError as error:
        return recipe, (), (str(error),)


def _shares(
    index: CheckpointIndex, weights: Sequence[StoredWeight], recipe: Recipe | None
) -> tuple[Share, ...]:
    grouped: dict[tuple[str, str], list[StoredWeight]] = defaultdict(list)
    for weight in weights:
        grouped[weight.spec.family, _format_name(weight)].append(weight)
    shares = []
    for (family, name), group in grouped.items():
        parts = distinct_parts(group)
        params = sum(math.prod(weight.spec.shape) for weight in group)
        num_bytes = sum(part.num_bytes for part in parts)
        shares.append(Share(family, name, len(parts), len(group), params, num_bytes))
    prefixes = recipe.tolerated_prefixes if recipe is not None else ()
    tolerated: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in index.tensors.values():
        if prefixes and tensor.name.startswith(prefixes):
            for place, value in enumerate((1, math.prod(tensor.shape), tensor.num_bytes)):
                tolerated[tensor.dtype][place] += value
    shares += [
        Share("not loaded", dtype, count, count, params, num_bytes)
        for dtype, (count, params, num_bytes) in tolerated.items()
    ]
    return tuple(shares)


def _format_name(weight: StoredWeight) -> str:
    plain = weight.format is WeightFormat.PLAIN
    return weight.parts["weight"].dtype if plain else str(weight.format)


def _ranks(weights: Sequence[StoredWeight], recipe: Recipe | None) -> tuple[RankBytes, ...]:
    result = []
    for world_size in recipe.tensor_parallel if recipe is not None and weights else ():
        try:
            shapes = [rank_shape(weight.spec, world_size) for weight in weights]
        except ConfigError:
            continue  # this checkpoint's sizes do not allow the degree
        stored = sum(
            format_bytes(
                shape,
                weight.format,
                element_bytes=_element_bytes(weight),
                block=weight.block,
                scale_bytes=weight.scale_bytes,
            )
            for weight, shape in zip(weights, shapes, strict=True)
        )
        narrow = sum(map(math.prod, shapes)) * BFLOAT16_BYTES
        result.append(RankBytes(world_size, stored, narrow))
    return tuple(result)


def _element_bytes(weight: StoredWeight) -> int:
    """Bytes per element of a plain tensor; of no meaning for others."""
    return weight.num_bytes // max(math.prod(weight.spec.shape), 1)


def render(report: InspectReport) -> str:
    """The report as text, at most 100 columns wide but for long tensor names."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, soft_wrap=True)
    recipe = report.recipe or "no recipe"
    console.print(f"{escape(str(report.folder))}: {escape(recipe)}", highlight=False)
    console.print(
        f"{report.num_tensors:,} tensors in {report.num_files} files, "
        f"{report.total_bytes:,} bytes ({report.total_bytes / GIB:.3f} GiB)"
    )
    if report.shares:
        console.print(_shares_table(report.shares))
    if report.ranks:
        console.print(_ranks_table(report.ranks))
    if report.w4a4:
        console.print(f"{report.w4a4} weights carry an activation scale (W4A4)")
    _print_lines(console, "notice", report.notices)
    _print_lines(console, "problem", report.problems)
    if not report.problems:
        console.print("no problems: every listed tensor is there and nothing unknown")
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().rstrip("\n")


def _shares_table(shares: Sequence[Share]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("family", "format"):
        table.add_column(name)
    for name in ("tensors", "weights", "parameters", "bytes", "GiB"):
        table.add_column(name, justify="right")
    for share in shares:
        _add_row(table, (share.family, share.format), share)
    totals: Mapping[str, list[Share]] = {
        family: [share for share in shares if share.family == family]
        for family in dict.fromkeys(share.family for share in shares)
    }
    for family, group in totals.items():
        if len(group) > 1:
            summed = Share(
                family,
                "all",
                sum(share.tensors for share in group),
                sum(share.weights for share in group),
                sum(share.params for share in group),
                sum(share.num_bytes for share in group),
            )
            _add_row(table, (family, "all"), summed)
    return table


def _add_row(table: Table, names: tuple[str, str], share: Share) -> None:
    numbers = (share.tensors, share.weights, share.params, share.num_bytes)
    table.add_row(*names, *(f"{n:,}" for n in numbers), f"{share.num_bytes / GIB:.3f}")


def _ranks_table(ranks: Sequence[RankBytes]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("ranks", "GiB per rank as stored", "GiB per rank in bfloat16"):
        table.add_column(name, justify="right")
    for row in ranks:
        numbers = (row.stored_bytes / GIB, row.bfloat16_bytes / GIB)
        table.add_row(str(row.world_size), *(f"{number:.3f}" for number in numbers))
    return table


def _print_lines(console: Console, kind: str, lines: Sequence[str]) -> None:
    for line in lines[:MAX_LISTED]:
        console.print(f"{kind}: {escape(line)}", highlight=False)
    if len(lines) > MAX_LISTED:
        console.print(f"... and {len(lines) - MAX_LISTED} more {kind}s")

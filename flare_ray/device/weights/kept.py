"""What stays as stored instead of being dequantised, and what stays off the device (contract: M6,
M8, R5).

Routed experts may stay packed: all matrices of a layer's experts in one format whose groups or
blocks the ranks' parts do not cut. Rows of embedding tables stay packed wherever they lie; off the
device even plain ones keep their stored type. Builders and the plan's byte count ask here, so they
cannot differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flare_ray.device.weights.budget import SCALE_BYTES, HeldForm, rank_shape
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.mxfp4 import GROUP as MX_GROUP
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.index import DTYPE_BITS, CheckpointIndex, scan_checkpoint
from flare_ray.device.weights.manifest import check_manifest
from flare_ray.device.weights.stored import StoredWeight
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import Family, TensorSpec

EXPERTS = ".experts."
"""Between a layer's prefix and a routed expert's number, in every recipe."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """The deployment's choice of what is kept how.

    Attributes:
        device: where programs compute, "cpu" or "cuda".
        experts: routed experts stay as stored; "auto" = on CUDA.
        tables: where embedding tables lie.
    """

    device: str
    experts: Literal["auto", "packed", "dequantised"] = "auto"
    tables: Literal["device", "host", "disk"] = "device"

    @property
    def packs(self) -> bool:
        """Routed experts stay packed where they can."""
        return self.experts == "packed" or (self.experts == "auto" and self.device == "cuda")


def kept_format(
    stored: Iterable[StoredWeight], keeping: Keeping, *, sizes: Iterable[int], layer: str = ""
) -> WeightFormat:
    """In which format one layer's routed experts stay; PLAIN = they are dequantised.

    Args:
        stored: all their matrices.
        sizes: rows and columns of one rank's matrices.
        layer: names them in a refusal.
    Raises:
        ConfigError: they were to be packed whatever else, and cannot be.
    """
    if not keeping.packs:
        return WeightFormat.PLAIN
    edges, sizes = {(w.format, _edge(w, keeping)) for w in stored}, sorted(set(sizes))
    if len(edges) == 1:
        ((form, edge),) = edges
        if edge and not any(size % edge for size in sizes):
            return form
    if keeping.experts == "packed":
        forms = " and ".join(sorted({form.value for form, _ in edges})) or "one tensor a layer"
        raise ConfigError(
            f"expert_weights: packed, but the routed experts of {layer} are stored as {forms}, of "
            f"{' x '.join(map(str, sizes))} a rank, which nothing on {keeping.device} unpacks; set "
            "expert_weights: auto or choose another tensor_parallel_size"
        )
    return WeightFormat.PLAIN


def _edge(stored: StoredWeight, keeping: Keeping) -> int:
    """What sizes must be multiples of for a matrix to stay packed; 0 = it cannot."""
    if stored.format is WeightFormat.FP8_BLOCK:
        known = stored.block == DEFAULT_BLOCK and stored.scale_bytes == SCALE_BYTES
        return DEFAULT_BLOCK[0] if known and keeping.device == "cuda" else 0
    return {"nvfp4": GROUP, "mxfp4": MX_GROUP}.get(stored.format.kind, 0)


def held_forms(
    folder: str | Path,
    specs: Sequence[TensorSpec],
    keeping: Keeping,
    *,
    world_size: int,
    families: Iterable[Family],
) -> Callable[[TensorSpec], HeldForm]:
    """How each listed tensor is held, from the headers of a checkpoint's files.

    Without files (a plan from config.json alone) everything counts as dequantised, the most that
    can be held.

    Args:
        specs: the recipe's manifest.
        families: families that are loaded.
    Raises:
        ConfigError: as `kept_format`.
    """
    index = scan_checkpoint(folder)[0]
    weights = _validated(index, specs, families) if index.tensors else {}
    forms = dict(_experts_of(weights, keeping, world_size))
    for spec in specs:
        if spec.table:
            forms[spec.name] = _table_form(weights.get(spec.name), keeping)
    plain = HeldForm()
    return lambda spec: forms.get(spec.name, plain)


def _validated(
    index: CheckpointIndex, specs: Sequence[TensorSpec], families: Iterable[Family]
) -> Mapping[str, StoredWeight]:
    validated, _problems = check_manifest(index, specs, families=families)
    return validated.weights


def _experts_of(
    weights: Mapping[str, StoredWeight], keeping: Keeping, world_size: int
) -> Iterable[tuple[str, HeldForm]]:
    layers: dict[str, list[str]] = defaultdict(list)
    for name in weights if keeping.packs else ():
        if EXPERTS in name:
            layers[name.partition(EXPERTS)[0]].append(name)
    for layer, names in layers.items():
        stored = [weights[name] for name in names]
        sizes = {size for weight in stored for size in rank_shape(weight.spec, world_size)}
        chosen = kept_format(stored, keeping, sizes=sizes, layer=layer)
        yield from dict.fromkeys(names, HeldForm(chosen)).items()


def _table_form(stored: StoredWeight | None, keeping: Keeping) -> HeldForm:
    off_device = keeping.tables != "device"
    if stored is None:
        return HeldForm(off_device=off_device)
    if stored.format is WeightFormat.PLAIN:
        own = DTYPE_BITS[stored.parts["weight"].dtype] // 8 if off_device else 0
        return HeldForm(element_bytes=own, off_device=off_device)
    return HeldForm(
        stored.format,
        block=stored.block,
        scale_bytes=stored.scale_bytes,
        off_device=off_device,
    )

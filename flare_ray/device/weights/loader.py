"""One rank's share of a checkpoint: only the slices it needs, read from the files' mapped pages.

A builder asks by published name and says how the tensor is divided; what comes back is a tensor in
the engine's type, or the packed parts for kernels that dequantise themselves. The loader remembers
what was asked for, so that a builder that forgets a tensor is caught before it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from flare_ray.device.weights.budget import shard_bounds
from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.mxfp4 import GROUP as MX_GROUP
from flare_ray.device.weights.formats.mxfp4 import Mxfp4Parts
from flare_ray.device.weights.formats.nvfp4 import GROUP, Nvfp4Parts
from flare_ray.device.weights.index import CheckpointIndex, StoredTensor
from flare_ray.device.weights.kept import Keeping
from flare_ray.device.weights.manifest import BOTH_FAMILIES, validate_listed
from flare_ray.device.weights.stored import StoredWeight
from flare_ray.errors import CheckpointError, ConfigError, ContractViolation
from flare_ray.recipes.declaration import Family, TensorSpec

Range = tuple[int, int]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Split:
    """The `index`-th of `count` parts along `dim`, equal unless the spec says which must stay
    whole."""

    dim: int
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Rows of a table as stored: views of a file's mapped pages, which are read when rows are.

    Attributes:
        values: [N, D], plain or float8_e4m3fn.
        exponents: [N, groups] uint8, biased exponents of the scales of runs of channels; None =
            there are none.
        scale: of all values.
    """

    values: Tensor
    exponents: Tensor | None = None
    scale: float = 1.0


class RankWeights:
    """Reads a rank's tensors by name (contract: R5).

    Args:
        index: an opened checkpoint.
        specs: the recipe's whole manifest, both families.
        device: where tensors are put.
        dtype: type of tensors that are asked for without one.
        families: families whose tensors may be asked for; those of the others are left alone.
        keeping: what builders keep packed or off the device; None = what the device's default is.
    Raises:
        CheckpointError: a listed tensor of `families` is missing, misshapen, mistyped or wrongly
            declared. Nothing has been allocated by then. Unlisted tensors are `validate`'s matter.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        specs: Sequence[TensorSpec],
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        families: Iterable[Family] = BOTH_FAMILIES,
        keeping: Keeping | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.keeping = Keeping(self.device.type) if keeping is None else keeping
        self._families = frozenset(families)
        self._specs = {spec.name: spec for spec in specs}
        self._weights = self._listed(index, specs)
        self._folder = index.folder
        self._files: dict[Path, safe_open] = {}
        self._used: set[str] = set()
        self._shared: dict[tuple[str, Split | None, torch.dtype], Tensor] = {}
        self._made: dict[str, object] = {}
        self._bytes_loaded = 0

    def _listed(
        self, index: CheckpointIndex, specs: Sequence[TensorSpec]
    ) -> Mapping[str, StoredWeight]:
        """How each listed tensor is stored, checked."""
        return validate_listed(index, specs, families=self._families).weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and of shared tensors; tensors handed out stay valid."""
        self._files.clear()
        self._shared.clear()
        self._made.clear()

    @property
    def bytes_loaded(self) -> int:
        """Stored bytes read so far, scales included; a tensor read twice counts twice."""
        return self._bytes_loaded

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies, for what it holds beside tensors."""
        return self._folder

    def spec(self, name: str) -> TensorSpec:
        """The manifest's line of a name.

        Raises:
            ContractViolation: the manifest does not list it, or its family is not loaded.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise ContractViolation(f"{name} is not in the recipe's manifest; list it there")
        if spec.family not in self._families:
            raise ContractViolation(
                f"{name} belongs to the {spec.family}, and only {sorted(self._families)} is loaded"
            )
        return spec

    def is_quantised(self, name: str) -> bool:
        """Whether a stored tensor is in a quantised format. Raises as `tensor` does."""
        weight, _ranges = self._ask(name, None)
        return weight.format is not WeightFormat.PLAIN

    def stored(self, name: str) -> StoredWeight:
        """How a tensor is stored; no use of it.

        Raises:
            ContractViolation: it is not listed, its family is not loaded, or it is not stored.
        """
        if not self.has(name):
            raise ContractViolation(f"{name} is tolerated, not stored; ask has() first")
        return self._weights[name]

    def has(self, name: str) -> bool:
        """Whether a listed tensor is stored (tolerated ones may be absent).

        Raises:
            ContractViolation: the manifest does not list it, or its family is not loaded.
        """
        self.spec(name)
        return name in self._weights

    def tensor(
        self, name: str, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor, or this rank's part of it, dequantised; the memory is the caller's own.

        Args:
            name: published name, as listed.
            split: the part to read; None = all of it.
            dtype: None = the engine's type.
        Raises:
            ConfigError: the split does not divide the tensor, or would cut an NVFP4 group.
            CheckpointError: a stored scale cannot be a scale.
            ContractViolation: the tensor is not listed or not stored, or its spec divides it
                along another dimension.
        """
        weight, ranges = self._ask(name, split)
        wanted = self.dtype if dtype is None else dtype
        if weight.format is not WeightFormat.PLAIN:
            return self._parts(weight, ranges).dequantise(wanted)
        stored = self._read(weight.parts["weight"], ranges)
        result = torch.empty(stored.shape, dtype=wanted, device=self.device)
        return result.copy_(stored)

    def shared(
        self, name: str, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `tensor`, but every call with the same arguments returns one and the same tensor.

        For what target and drafter both use (embedding, head): it exists once. Read-only for all.
        """
        key = (name, split, self.dtype if dtype is None else dtype)
        if key not in self._shared:
            self._shared[key] = self.tensor(name, split=split, dtype=dtype)
        return self._shared[key]

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What `make` returned at the first call with this key: for a tensor in its run-time layout
        that target and drafter both use."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])

    def quantised(
        self, name: str, *, split: Split | None = None
    ) -> Fp8BlockParts | Mxfp4Parts | Nvfp4Parts | None:
        """Packed parts of a quantised tensor on the device, or None where it is stored plain.

        None does not count as use; ask for the `tensor` then. Raises as `tensor` does.
        """
        if not self.has(name) or self._weights[name].format is WeightFormat.PLAIN:
            return None
        weight, ranges = self._ask(name, split)
        return self._parts(weight, ranges, own=True)

    def mapped_rows(self, name: str, *, split: Split | None = None) -> MappedRows:
        """Rows of a table as stored.

        Raises:
            CheckpointError: it is quantised otherwise than in FP8 with scales within one row, or
                with one for the whole table.
            ContractViolation: as `tensor`.
        """
        weight, ranges = self._ask(name, split)
        rows, columns = ranges
        values = self._read(weight.parts["weight"], ranges)
        if weight.format is WeightFormat.PLAIN:
            return MappedRows(values)
        if weight.format is WeightFormat.FP8_TENSOR:
            return MappedRows(values, scale=float(self._scale(weight.parts["scale"])))
        if weight.block[0] != 1 or weight.scale_bytes != 1:
            raise CheckpointError(
                f"{name} is stored as {weight.format} with scales over several rows; expected FP8 "
                "with exponents per 32 channels of one row"
            )
        scale = self._read(weight.parts["scale"], (rows, _shrunk(columns, weight.block[1])))
        return MappedRows(values, scale.view(torch.uint8))

    def assert_all_used(self, family: Family) -> None:
        """Check that the builder asked for everything its family requires.

        Raises:
            ContractViolation: names each required tensor that was never asked for.
        """
        left = [
            name
            for name, spec in self._specs.items()
            if spec.family == family
            and spec.required
            and name in self._weights
            and name not in self._used
        ]
        if left:
            raise ContractViolation(
                f"the {family} builder left {len(left)} required tensors unread: "
                f"{', '.join(left)}; read them, or take them out of the manifest"
            )

    def _ask(self, name: str, split: Split | None) -> tuple[StoredWeight, tuple[Range, ...]]:
        spec = self.spec(name)
        if name not in self._weights:
            raise ContractViolation(f"{name} is tolerated, not stored; ask has() before reading it")
        if split is not None and split.count > 1 and split.dim != spec.shard_dim:
            raise ContractViolation(
                f"{name}: split along dimension {split.dim}, its spec says shard_dim "
                f"{spec.shard_dim}; make the two agree"
            )
        ranges = _ranges(spec, split)
        self._used.add(name)
        return self._weights[name], ranges

    def _parts(
        self, weight: StoredWeight, ranges: tuple[Range, ...], *, own: bool = False
    ) -> Fp8BlockParts | Mxfp4Parts | Nvfp4Parts:
        """Parts on the device. Not `own`: for dequantisation at once, so without the activations'
        scale and, on the CPU, without leaving the file's mapped pages."""
        parts = weight.parts
        if weight.format is WeightFormat.FP8_TENSOR:
            raise ContractViolation(f"{weight.spec.name} is a table; read it as mapped_rows")
        if weight.format is WeightFormat.FP8_BLOCK:
            covering = tuple(
                (start // edge, -(-stop // edge))
                for (start, stop), edge in zip(ranges, weight.block, strict=True)
            )
            offset = tuple(
                start % edge for (start, _), edge in zip(ranges, weight.block, strict=True)
            )
            return Fp8BlockParts(
                self._place(self._read(parts["weight"], ranges), own),
                self._place(self._read(parts["scale"], covering).to(torch.float32), own),
                weight.block,
                (offset[0], offset[1]),
            )
        rows, columns = ranges
        if weight.format is WeightFormat.MXFP4:
            _refuse_cut_groups(weight, columns, MX_GROUP)
            packed = self._read(parts["weight"], (rows, _shrunk(columns, 2))).view(torch.uint8)
            scale = self._read(parts["scale"], (rows, _shrunk(columns, MX_GROUP)))
            exponents = scale.view(torch.uint8)
            return Mxfp4Parts(self._place(packed, own), self._place(exponents, own))
        _refuse_cut_groups(weight, columns, GROUP)
        divides = weight.format is WeightFormat.NVFP4_COMPRESSED
        activation = parts.get("input_scale") if own else None
        return Nvfp4Parts(
            self._place(self._read(parts["weight"], (rows, _shrunk(columns, 2))), own),
            self._place(self._read(parts["scale"], (rows, _shrunk(columns, GROUP))), own),
            self._place(self._scale(parts["global_scale"]), own),
            divides,
            None if activation is None else self._place(self._scale(activation), own),
        )

    def _place(self, stored: Tensor, own: bool) -> Tensor:
        placed = stored.to(self.device)
        return placed.clone(memory_format=torch.contiguous_format) if own else placed

    def _scale(self, part: StoredTensor) -> Tensor:
        """A whole-matrix scale, [] float32, checked: a wrong one ruins every weight silently."""
        value = self._read(part, tuple((0, size) for size in part.shape)).reshape(())
        number = float(value)
        if not 0.0 < number < float("inf"):
            raise CheckpointError(
                f"{part.name} in {part.file.name} is {number}; a scale is finite and above zero; "
                "download or export the checkpoint again"
            )
        return value

    def _read(self, part: StoredTensor, ranges: tuple[Range, ...]) -> Tensor:
        """The named rectangle of a stored tensor: a view of the file's mapped pages."""
        file = self._files.get(part.file)
        if file is None:
            file = safe_open(part.file, framework="pt", device="cpu")
            self._files[part.file] = file
        if all(bounds == (0, size) for bounds, size in zip(ranges, part.shape, strict=True)):
            result = file.get_tensor(part.name)
        else:
            result = file.get_slice(part.name)[tuple(slice(*bounds) for bounds in ranges)]
        self._bytes_loaded += result.numel() * result.element_size()
        return result


def _ranges(spec: TensorSpec, split: Split | None) -> tuple[Range, ...]:
    """Start and stop along every dimension."""
    ranges = [(0, size) for size in spec.shape]
    if split is None:
        return tuple(ranges)
    if not 0 <= split.dim < len(spec.shape) or not 0 <= split.index < split.count:
        raise ContractViolation(f"{spec.name} {list(spec.shape)} has no part {split}")
    if split.count > 1:
        ranges[split.dim] = shard_bounds(spec, split.count)[split.index]
    return tuple(ranges)


def _refuse_cut_groups(weight: StoredWeight, columns: Range, group: int) -> None:
    if columns[0] % group or columns[1] % group:
        raise ConfigError(
            f"{weight.spec.name}: columns {columns[0]} to {columns[1]} cut a group of {group} "
            f"that shares one {weight.format} scale; choose a tensor_parallel_size that leaves a "
            f"multiple of {group} columns per rank"
        )


def _shrunk(bounds: Range, factor: int) -> Range:
    return bounds[0] // factor, bounds[1] // factor

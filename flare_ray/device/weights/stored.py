"""Which format one listed tensor is stored in, and whether its parts fit together.

The tensors decide. For a matrix `m.weight` of shape [N, K] (a name without `.weight` keeps its
whole name before the suffix):

    FP8 block         m.weight F8_E4M3 [N, K], and m.weight_scale_inv F32 (or m.weight_scale F32 or
                      BF16) [ceil(N / block), ceil(K / block)]
    NVFP4, ModelOpt   m.weight U8 [N, K / 2], m.weight_scale F8_E4M3 [N, K / 16],
                      m.weight_scale_2 F32 scalar, optional m.input_scale
    NVFP4, compressed-tensors
                      m.weight_packed, m.weight_scale, m.weight_global_scale (a divisor), optional
                      m.input_global_scale
    FP8 and MXFP4 with power-of-two scales
                      m.weight F8_E4M3 [N, K] and m.scale F8_E8M0 per block, or per 32 inputs of one
                      row; m.weight I8 [N, K / 2] and m.scale F8_E8M0 [N, K / 32]
    FP8 table         m.weight F8_E4M3 [N, D], and one scalar F32 or BF16 named by the spec
                      (`TensorSpec.shared_scale`), the same for every part of the table
    plain             m.weight BF16, F16 or F32 (I64 where the spec says so), and none of these
                      companions
The same under other names, other per-tensor FP8, packed integers and compressed block scales are
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flare_ray.device.weights.formats import WeightFormat, mxfp4
from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.index import StoredTensor
from flare_ray.recipes.declaration import TensorSpec

PLAIN_DTYPES = ("BF16", "F16", "F32")
INTEGER_DTYPES = ("I64",)
SCALAR_SHAPES = ((), (1,))
# Suffix of the tensor's own name -> what the part is.
WEIGHT_SUFFIXES = ("_scale_inv", "_scale", "_scale_2", "_packed", "_global_scale")
# Names beside `.weight` in the same module.
INPUT_NAMES = ("input_scale", "input_global_scale")
POWER_SCALE = "scale"
"""Beside `.weight`: exponents of power-of-two scales."""
ROW_BLOCK = (1, mxfp4.GROUP)
CSF_SUFFIX = "_scale.nvfp4_csf_fixed"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One listed tensor as the checkpoint stores it.

    Attributes:
        parts: role -> stored tensor; "weight" always, besides "scale", "global_scale" and
            "input_scale" as the format has them.
        block: rows and columns of an FP8 block.
    """

    spec: TensorSpec
    format: WeightFormat
    parts: Mapping[str, StoredTensor]
    block: tuple[int, int] = DEFAULT_BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def scale_bytes(self) -> int:
        """Bytes of one block scale: exponents take one."""
        return 1 if "scale" in self.parts and self.parts["scale"].dtype == "F8_E8M0" else 4

    @property
    def quantises_activations(self) -> bool:
        """The checkpoint declares W4A4: an activation scale is stored beside the weight."""
        return "input_scale" in self.parts


def distinct_parts(weights: Iterable[StoredWeight]) -> list[StoredTensor]:
    """Stored tensors of these weights, each once: the shards of a table share their scale."""
    return list({part.name: part for weight in weights for part in weight.parts.values()}.values())


@dataclass(frozen=True, slots=True)
class Resolution:
    """What was found for one spec: a stored weight, problems, or neither (it is absent).

    names: every stored name that belongs to the spec, whether it fitted or not.
    """

    weight: StoredWeight | None
    problems: tuple[str, ...]
    names: tuple[str, ...]


def module_of(name: str) -> str:
    """Module of a tensor name, as configurations spell it: without `.weight`."""
    return name.removesuffix(".weight")


def related_names(name: str) -> tuple[str, ...]:
    """Every name under which a tensor or one of its companions may be stored."""
    module = module_of(name)
    beside = (*INPUT_NAMES, POWER_SCALE)
    inputs = tuple(f"{module}.{extra}" for extra in beside) if module != name else ()
    return (name, *(name + suffix for suffix in WEIGHT_SUFFIXES), name + CSF_SUFFIX, *inputs)


def resolve(
    spec: TensorSpec, tensors: Mapping[str, StoredTensor], block: tuple[int, int] = DEFAULT_BLOCK
) -> Resolution:
    """Find a listed tensor's parts and check types and shapes against its full shape.

    Args:
        spec: the listed tensor.
        tensors: everything the checkpoint stores.
        block: FP8 block declared by the checkpoint.
    """
    names = tuple(name for name in related_names(spec.name) if name in tensors)
    if not names:
        return Resolution(None, (), ())
    finder = _Finder(spec, tensors, block)
    weight = finder.find()
    return Resolution(None if finder.problems else weight, tuple(finder.problems), names)


class _Finder:
    """Resolves one spec, collecting problems."""

    def __init__(
        self, spec: TensorSpec, tensors: Mapping[str, StoredTensor], block: tuple[int, int]
    ) -> None:
        self.spec = spec
        self.tensors = tensors
        self.block = block
        self.problems: list[str] = []

    def find(self) -> StoredWeight | None:
        plain, packed = self._get(""), self._get("_packed")
        if self._get(CSF_SUFFIX) is not None:
            return self._refuse(
                "its block scales are CSF-compressed",
                "use an export of this checkpoint with ordinary weight_scale tensors",
            )
        if plain is not None and packed is not None:
            return self._refuse(
                f"stored both as {plain.name} and as {packed.name}", "keep one of the two"
            )
        if packed is not None:
            return self._quantised(self._compressed_nvfp4, packed)
        if plain is None:
            lonely = [n for n in related_names(self.spec.name) if n in self.tensors]
            return self._refuse(f"only {', '.join(lonely)} stored", "its weight is missing")
        if self._power_scale() is not None:
            by_powers = self._mxfp4 if plain.dtype == "I8" else self._fp8_powers
            return self._quantised(by_powers, plain)
        shared = self.tensors.get(self.spec.shared_scale)
        if shared is not None:
            return self._fp8_table(plain, shared)
        if plain.dtype == "U8" or self._get("_scale_2") is not None:
            return self._quantised(self._modelopt_nvfp4, plain)
        if plain.dtype.startswith("F8") or self._get("_scale_inv") is not None:
            return self._quantised(self._fp8_block, plain)
        return self._plain(plain)

    def _get(self, suffix: str) -> StoredTensor | None:
        return self.tensors.get(self.spec.name + suffix)

    def _power_scale(self) -> StoredTensor | None:
        module = module_of(self.spec.name)
        return None if module == self.spec.name else self.tensors.get(f"{module}.{POWER_SCALE}")

    def _refuse(self, what: str, change: str) -> StoredWeight | None:
        self.problems.append(f"{self.spec.name}: {what}; {change}")
        return None

    def _plain(self, weight: StoredTensor) -> StoredWeight:
        stray = self._get("_scale")
        if stray is not None:
            self._refuse(
                f"{weight.dtype} weight beside a scale {stray.name} {stray.dtype}",
                "expected a quantised weight or no scale",
            )
        dtypes = INTEGER_DTYPES if self.spec.integer else PLAIN_DTYPES
        self._check(weight, dtypes, (self.spec.shape,))
        return StoredWeight(self.spec, WeightFormat.PLAIN, {"weight": weight})

    def _quantised(
        self, find_parts: Callable[[StoredTensor], StoredWeight | None], weight: StoredTensor
    ) -> StoredWeight | None:
        if not self.spec.quantisable:
            return self._refuse(
                f"stored quantised ({weight.name} {weight.dtype})",
                f"this tensor must be one of {', '.join(PLAIN_DTYPES)}",
            )
        if len(self.spec.shape) != 2:
            return self._refuse(
                f"stored quantised, with shape {list(self.spec.shape)}", "only matrices may be"
            )
        return find_parts(weight)

    def _modelopt_nvfp4(self, weight: StoredTensor) -> StoredWeight:
        parts = self._nvfp4_parts(weight, "_scale_2", "input_scale")
        return StoredWeight(self.spec, WeightFormat.NVFP4_MODELOPT, parts)

    def _compressed_nvfp4(self, weight: StoredTensor) -> StoredWeight:
        parts = self._nvfp4_parts(weight, "_global_scale", "input_global_scale")
        return StoredWeight(self.spec, WeightFormat.NVFP4_COMPRESSED, parts)

    def _nvfp4_parts(
        self, weight: StoredTensor, global_suffix: str, input_name: str
    ) -> dict[str, StoredTensor]:
        rows, columns = self.spec.shape
        if columns % GROUP:
            self._refuse(
                f"stored as NVFP4, but its {columns} columns are no multiple of {GROUP}",
                "store it plain",
            )
        scale = self._get("_scale")
        if scale is not None and scale.dtype in ("U8", "F8_E8M0"):
            self._refuse(
                f"MXFP4 ({weight.name} with {scale.dtype} block scales) is not supported",
                "use an NVFP4, FP8-block or BF16 export",
            )
            return {"weight": weight}
        parts = {"weight": self._check(weight, ("U8",), ((rows, columns // 2),))}
        self._part(parts, "scale", "_scale", ("F8_E4M3",), ((rows, columns // GROUP),))
        self._part(parts, "global_scale", global_suffix, ("F32",), SCALAR_SHAPES)
        module = module_of(self.spec.name)
        activation = self.tensors.get(f"{module}.{input_name}")
        if activation is not None and module != self.spec.name:
            parts["input_scale"] = self._check(activation, ("F32",), SCALAR_SHAPES)
        return parts

    def _fp8_block(self, weight: StoredTensor) -> StoredWeight | None:
        inverse, scale = self._get("_scale_inv"), self._get("_scale")
        if inverse is None and scale is not None:
            if scale.dtype in ("U8", "F8_E8M0"):
                return self._refuse(
                    f"MXFP8 ({weight.dtype} with {scale.dtype} scales {list(scale.shape)}) is not "
                    "supported",
                    "use an FP8-block, NVFP4 or BF16 export",
                )
            if scale.shape != self._block_grid():
                return self._refuse(
                    f"FP8 with scales of shape {list(scale.shape)} (per tensor or per channel) is "
                    "not supported",
                    f"expected one per block, {list(self._block_grid())}",
                )
        parts = {"weight": self._check(weight, ("F8_E4M3",), (self.spec.shape,))}
        if inverse is not None or scale is None:
            self._part(parts, "scale", "_scale_inv", ("F32",), (self._block_grid(),))
        else:
            parts["scale"] = self._check(scale, ("F32", "BF16"), (self._block_grid(),))
        return StoredWeight(self.spec, WeightFormat.FP8_BLOCK, parts, self.block)

    def _fp8_table(self, weight: StoredTensor, scale: StoredTensor) -> StoredWeight:
        parts = {
            "weight": self._check(weight, ("F8_E4M3",), (self.spec.shape,)),
            "scale": self._check(scale, ("F32", "BF16"), SCALAR_SHAPES),
        }
        return StoredWeight(self.spec, WeightFormat.FP8_TENSOR, parts)

    def _fp8_powers(self, weight: StoredTensor) -> StoredWeight | None:
        """FP8 with exponents per block, or per group of one row's inputs."""
        scale = self._power_scale()
        assert scale is not None
        rows, columns = self.spec.shape
        by_row = columns % ROW_BLOCK[1] == 0 and scale.shape == (rows, columns // ROW_BLOCK[1])
        by_row = by_row and scale.shape != self._block_grid()
        parts = {
            "weight": self._check(weight, ("F8_E4M3",), (self.spec.shape,)),
            "scale": self._check(
                scale, ("F8_E8M0",), (scale.shape if by_row else self._block_grid(),)
            ),
        }
        block = ROW_BLOCK if by_row else self.block
        return StoredWeight(self.spec, WeightFormat.FP8_BLOCK, parts, block)

    def _mxfp4(self, weight: StoredTensor) -> StoredWeight | None:
        scale = self._power_scale()
        assert scale is not None
        rows, columns = self.spec.shape
        if columns % mxfp4.GROUP:
            return self._refuse(
                f"stored as MXFP4, but its {columns} columns are no multiple of {mxfp4.GROUP}",
                "store it plain",
            )
        parts = {
            "weight": self._check(weight, ("I8",), ((rows, columns // 2),)),
            "scale": self._check(scale, ("F8_E8M0",), ((rows, columns // mxfp4.GROUP),)),
        }
        return StoredWeight(self.spec, WeightFormat.MXFP4, parts, ROW_BLOCK)

    def _block_grid(self) -> tuple[int, ...]:
        return tuple(-(-s // edge) for s, edge in zip(self.spec.shape, self.block, strict=True))

    def _part(
        self,
        parts: dict[str, StoredTensor],
        role: str,
        suffix: str,
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        part = self._get(suffix)
        if part is None:
            self.problems.append(
                f"{self.spec.name}{suffix}: missing; expected {' or '.join(dtypes)} "
                f"{list(shapes[0])} beside {parts['weight'].name} {parts['weight'].dtype}"
            )
        else:
            parts[role] = self._check(part, dtypes, shapes)

    def _check(
        self, tensor: StoredTensor, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> StoredTensor:
        if tensor.dtype not in dtypes:
            self.problems.append(
                f"{tensor.name}: type {tensor.dtype}, expected {' or '.join(dtypes)}"
            )
        if tensor.shape not in shapes:
            self.problems.append(
                f"{tensor.name}: shape {list(tensor.shape)}, expected {list(shapes[0])}"
            )
        return tensor

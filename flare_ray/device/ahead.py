"""Kernels of an engine, compiled without its device and without its weights.

Every program of the catalog runs once on tensors without data (ops/ahead), built from the recipe's
shapes: the same builders, the same state, the same variants as at a start. What a start compiles on
the device is therefore what is compiled here, for settings that are equal: other ranks, slots,
contexts or chunks are other specialisations of some kernels, which the start then adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flare_ray.config import EngineConfig
from flare_ray.device.executor import state_limits
from flare_ray.device.graphs.captured import CapturedBackend
from flare_ray.device.graphs.recording import Run
from flare_ray.device.keeping import keeping_of
from flare_ray.device.ops.ahead.api import compiling
from flare_ray.device.parts import EnginePlan, build_parts
from flare_ray.device.prepare import make_plan
from flare_ray.device.speculation.round import Model
from flare_ray.device.state.store import TORCH_DTYPE, StateStore
from flare_ray.device.weights.formats import WeightFormat, mxfp4, nvfp4
from flare_ray.device.weights.index import CheckpointIndex, StoredTensor
from flare_ray.device.weights.kept import EXPERTS
from flare_ray.device.weights.loader import Range, RankWeights
from flare_ray.device.weights.stored import ROW_BLOCK, StoredWeight
from flare_ray.errors import ConfigError
from flare_ray.recipes.declaration import TensorSpec, resolve

FORMATS = {
    "bfloat16": WeightFormat.PLAIN,
    "nvfp4": WeightFormat.NVFP4_MODELOPT,
    "mxfp4": WeightFormat.MXFP4,
}
"""Formats of routed experts by the names of the chart's `model.weightFormat`."""
_TORCH = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FP8_BLOCK = (32, 32)
"""Rows and columns of a scale where experts are MXFP4."""
KERNEL_SUFFIX = "*.cubin"


def compile_ahead(config: EngineConfig, folder: Path, *, experts: str) -> int:
    """Compile every kernel of a captured engine's rank into Triton's cache at `folder`.

    Args:
        config: `checkpoint` needs to hold config.json alone.
        experts: format of the routed experts, one of `FORMATS`; with mxfp4 all else that may be
            quantised is FP8, as it is released.
    Returns:
        How many kernels the folder holds.
    Raises:
        ConfigError: the engine is not one of CUDA graphs; Triton is missing; as `make_plan`.
    """
    if experts not in FORMATS:
        raise ConfigError(f"experts {experts!r}: choose one of {', '.join(FORMATS)}")
    plan = make_plan(config)
    if not plan.manifest.captured:
        raise ConfigError("kernels are compiled for device: cuda without eager; set both")
    folder.mkdir(parents=True, exist_ok=True)
    with compiling(folder), torch.inference_mode():
        model = _model(plan, config, FORMATS[experts])
        CapturedBackend(model, plan.manifest, _RunOnce()).warm()
    return len(list(folder.rglob(KERNEL_SUFFIX)))


def _model(plan: EnginePlan, config: EngineConfig, experts: WeightFormat) -> Model:
    """Target, drafter and state of one rank, without data."""
    weights = ShapedWeights(
        Path(config.checkpoint),
        resolve(plan.recipe.manifest)(plan.geometry),
        experts=experts,
        plan=plan,
        config=config,
    )
    parts = build_parts(plan, weights, _ShapedGroup(plan.manifest.world_size))
    return Model(parts.target, parts.drafter, StateStore(parts.spec, state_limits(plan.manifest)))


class ShapedWeights(RankWeights):
    """A rank's tensors as a release stores them, without data.

    Args:
        folder: of config.json.
        specs: the recipe's manifest.
        experts: format of the routed experts.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        experts: WeightFormat,
        plan: EnginePlan,
        config: EngineConfig,
    ) -> None:
        self._experts = experts
        super().__init__(
            CheckpointIndex(folder, {}, {}, {}),
            specs,
            device=plan.manifest.device,
            dtype=TORCH_DTYPE[plan.manifest.dtype],
            families=plan.families,
            keeping=keeping_of(config),
        )

    def _listed(
        self, index: CheckpointIndex, specs: Sequence[TensorSpec]
    ) -> Mapping[str, StoredWeight]:
        return {
            spec.name: stored_form(spec, self._experts)
            for spec in specs
            if spec.required and spec.family in self._families
        }

    def _read(self, part: StoredTensor, ranges: tuple[Range, ...]) -> Tensor:
        size = [stop - start for start, stop in ranges]
        return torch.empty(size, dtype=_TORCH[part.dtype], device=self.device)

    def _scale(self, part: StoredTensor) -> Tensor:
        return torch.empty((), dtype=torch.float32, device=self.device)


def stored_form(spec: TensorSpec, experts: WeightFormat) -> StoredWeight:
    """How a release with experts in a format stores a tensor."""

    def part(role: str, dtype: str, *shape: int) -> StoredTensor:
        num_bytes = math.prod(shape) * _TORCH[dtype].itemsize
        return StoredTensor(f"{spec.name}.{role}", dtype, shape, num_bytes, Path())

    routed = EXPERTS in spec.name and len(spec.shape) == 2
    beside = spec.quantisable and experts is WeightFormat.MXFP4
    if experts is WeightFormat.PLAIN or not (routed or beside):
        plain = part("weight", "BF16", *spec.shape)
        return StoredWeight(spec, WeightFormat.PLAIN, {"weight": plain})
    rows, columns = spec.shape
    if not routed:
        block = ROW_BLOCK if spec.table else FP8_BLOCK
        codes = part("weight", "F8_E4M3", rows, columns)
        scale = part("scale", "F8_E8M0", -(-rows // block[0]), -(-columns // block[1]))
        return StoredWeight(spec, WeightFormat.FP8_BLOCK, {"weight": codes, "scale": scale}, block)
    codes = part("weight", "U8", rows, columns // 2)
    if experts is WeightFormat.MXFP4:
        scale = part("scale", "F8_E8M0", rows, columns // mxfp4.GROUP)
        return StoredWeight(spec, experts, {"weight": codes, "scale": scale})
    scale = part("scale", "F8_E4M3", rows, columns // nvfp4.GROUP)
    whole = part("global_scale", "F32")
    return StoredWeight(spec, experts, {"weight": codes, "scale": scale, "global_scale": whole})


class _ShapedGroup:
    """Rank 0 of a group that exchanges shapes."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, value: Tensor) -> Tensor:
        """`value` itself."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """As wide as all ranks' parts."""
        return value.new_empty((*value.shape[:-1], value.shape[-1] * self.size))


class _RunOnce:
    """A recorder that runs each program once and keeps nothing."""

    def warm(self, run: Run) -> None:
        """See `Recorder`."""
        run()

    def record(self, run: Run) -> _RunOnce:
        """See `Recorder`; it has been run."""
        return self

    def replay(self) -> None:
        """A recorded program; there is none."""

    def finish(self) -> int:
        """See `Recorder`."""
        return 0

    def time_ns(self, graph: object) -> int:
        """See `Recorder`."""
        return 0

    def allocated_bytes(self) -> int:
        """See `Recorder`."""
        return 0

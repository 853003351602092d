"""Random weights by published name, made on the device when a builder asks for them.

Takes the place of `RankWeights`: same requests, same types, no files. Norms are one, biases and
base offsets zero, everything else Gaussian; routed experts may come, and then stay, in NVFP4 or
block FP8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts
from flare_ray.device.weights.kept import EXPERTS, Keeping
from flare_ray.device.weights.loader import Split
from flare_ray.device.weights.stored import StoredWeight
from flare_ray.recipes.declaration import TensorSpec

Made = TypeVar("Made")
_ONES = ("norm.weight", "layernorm.weight")
_ZEROS = ("A_log", "bias", "_base", "_ape", "dt_bias")


class RandomWeights:
    """Tensors of a manifest, made up.

    Args:
        specs: a recipe's manifest.
        experts: format of the routed experts.
        device / dtype: of plain tensors.
    """

    def __init__(
        self,
        specs: list[TensorSpec],
        *,
        experts: WeightFormat,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        plain = experts is WeightFormat.PLAIN
        self.keeping = Keeping(self.device.type, experts="auto" if plain else "packed")
        self._specs = {spec.name: spec for spec in specs}
        self._experts = experts
        self._made: dict[str, object] = {}

    def spec(self, name: str) -> TensorSpec:
        """See `RankWeights.spec`."""
        return self._specs[name]

    def stored(self, name: str) -> StoredWeight:
        """See `RankWeights.stored`; without files there are no parts."""
        form = self._experts if EXPERTS in name else WeightFormat.PLAIN
        return StoredWeight(self._specs[name], form, {})

    def has(self, name: str) -> bool:
        """Tolerated tensors are absent."""
        return self._specs[name].required

    def is_quantised(self, name: str) -> bool:
        """See `RankWeights.is_quantised`."""
        return self.stored(name).format is not WeightFormat.PLAIN

    def tensor(
        self, name: str, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `RankWeights.tensor`; every call makes another one."""
        shape = self._specs[name].shape
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if name.endswith(_ONES):
            return made.fill_(1.0)
        if name.endswith(_ZEROS):
            return made.zero_()
        if name.endswith("_scale"):
            return made.fill_(0.5)
        return made.normal_(std=1 / math.sqrt(shape[-1]))

    def shared(
        self, name: str, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `RankWeights.shared`."""
        return self.once(f"{name} {dtype}", lambda: self.tensor(name, split=split, dtype=dtype))

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """See `RankWeights.once`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def quantised(
        self, name: str, *, split: Split | None = None
    ) -> Fp8BlockParts | Nvfp4Parts | None:
        """See `RankWeights.quantised`."""
        if not self.is_quantised(name):
            return None
        rows, columns = self._specs[name].shape
        std = 1 / math.sqrt(columns)
        if self._experts is WeightFormat.FP8_BLOCK:
            codes = self._bytes(rows, columns).view(torch.int8).clamp_(-120, 120)
            scale = torch.full((rows // 128, columns // 128), std / 100, device=self.device)
            return Fp8BlockParts(codes.view(torch.float8_e4m3fn), scale)
        scale = torch.rand((rows, columns // 16), device=self.device) + 0.5
        return Nvfp4Parts(
            self._bytes(rows, columns // 2),
            scale.to(torch.float8_e4m3fn),
            torch.tensor(std / 3, device=self.device),
        )

    def _bytes(self, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)

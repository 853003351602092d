"""A rank's view of a checkpoint, with which every recipe's builders begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flare_ray.device.weights.formats.fp8_block import Fp8BlockParts
from flare_ray.device.weights.formats.mxfp4 import Mxfp4Parts
from flare_ray.device.weights.formats.nvfp4 import Nvfp4Parts
from flare_ray.device.weights.loader import RankWeights, Split
from flare_ray.recipes.declaration import COLUMNS, ROWS, Communicator

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True)
class RankReader(Generic[Shape]):
    """Reads whole tensors and this rank's parts by published name; recipes add what is theirs."""

    geometry: Shape
    weights: RankWeights
    comm: Communicator

    def whole(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as every rank holds it."""
        return self.weights.tensor(name, dtype=dtype)

    def rows(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of the outputs."""
        return self.weights.tensor(name, split=self.split(ROWS), dtype=dtype)

    def columns(self, name: str) -> Tensor:
        """This rank's part of the inputs."""
        return self.weights.tensor(name, split=self.split(COLUMNS))

    def packed_rows(self, name: str) -> Fp8BlockParts | Mxfp4Parts | Nvfp4Parts | None:
        """This rank's part of the outputs, as stored; None where it is stored plain."""
        return self.weights.quantised(name, split=self.split(ROWS))

    def packed_columns(self, name: str) -> Fp8BlockParts | Mxfp4Parts | Nvfp4Parts | None:
        """This rank's part of the inputs, as stored; None where it is stored plain."""
        return self.weights.quantised(name, split=self.split(COLUMNS))

    def split(self, dim: int) -> Split:
        """This rank's part along a dimension."""
        return Split(dim, self.comm.rank, self.comm.size)

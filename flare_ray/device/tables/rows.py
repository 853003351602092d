"""How a rank keeps its part of a table: as plain numbers, or as FP8 rows with group scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TableRows(Protocol):
    """This rank's part of a table."""

    def take(self, numbers: Tensor) -> Tensor:
        """Rows [R, D] in the engine's type, of local numbers [R] int64."""


@dataclass(slots=True)
class PlainRows:
    """weight: [N, D] in the engine's type."""

    weight: Tensor

    def take(self, numbers: Tensor) -> Tensor:
        """See `TableRows`."""
        return self.weight.index_select(0, numbers)


@dataclass(slots=True)
class Fp8Rows:
    """Rows in E4M3, one scale per group of their channels; dequantised when they are read.

    Attributes:
        weight: [N, D] float8_e4m3fn.
        scale: [N, D / group] uint8, biased exponents of powers of two.
        dtype: of what is handed out.
    """

    weight: Tensor
    scale: Tensor
    dtype: torch.dtype

    def take(self, numbers: Tensor) -> Tensor:
        """See `TableRows`."""
        # index_select knows no one-byte floats
        packed = self.weight.view(torch.uint8).index_select(0, numbers)
        values = packed.view(torch.float8_e4m3fn).to(torch.float32)
        exponents = self.scale.index_select(0, numbers).to(torch.int32)
        scales = (exponents << 23).view(torch.float32).unsqueeze(-1)
        grouped = values.unflatten(-1, (self.scale.shape[1], -1))
        return (grouped * scales).flatten(-2).to(self.dtype)

"""Reads rows by number out of host memory or out of a file's mapped pages.

On CUDA one kernel reads page-locked host memory over the bus, inside a captured program; each row
crosses once, packed as it is stored. On CPU rows are copied out of one or several tensors, which
may be views of mapped files: only the pages that hold those rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.errors import ContractViolation


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A table as stored, in parts of equally many rows one after the other.

    Attributes:
        values: [n, D] each, all of one type: bfloat16, float16, float32 or float8_e4m3fn.
        exponents: of float8 values: [n, groups] uint8 each, biased exponents of the scales of
            equal runs of channels; () = there are none.
        scale: of all values; other than 1.0 of float8 ones alone.
    """

    values: Sequence[Tensor]
    exponents: Sequence[Tensor] = ()
    scale: float = 1.0


class RowGather:
    """Rows of a table off the device.

    Args:
        stored: on the host; page-locked and of one part where `device` is CUDA.
        dtype: of what is handed out.
        device: where it is handed out.
    Raises:
        ContractViolation: parts differ in type or size, or cannot be read from there.
    """

    def __init__(self, stored: StoredRows, *, dtype: torch.dtype, device: torch.device) -> None:
        values = stored.values
        if len({(part.shape, part.dtype) for part in values}) != 1:
            raise ContractViolation("a table's parts differ in size or type; store them alike")
        self._stored, self._dtype, self._device = stored, dtype, device
        self._addresses = self._scale_addresses = torch.empty(0)
        if device.type == "cuda":
            if len(values) > 1 or not all(p.is_pinned() for p in (*values, *stored.exponents)):
                raise ContractViolation("CUDA programs read page-locked memory in one part")
            return
        self._addresses, self._scale_addresses = (
            torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64)
            for parts in (values, stored.exponents)
        )

    def __call__(self, numbers: Tensor) -> Tensor:
        """[R] int64 row numbers -> [R, D] of the wanted type."""
        if self._device.type == "cuda":
            from flare_ray.device.ops.row_gather import triton

            return triton.gather(self._stored, numbers, dtype=self._dtype)
        stored, exponents = self._stored, None
        values = self._copied(stored.values, self._addresses, numbers)
        if stored.exponents:
            exponents = self._copied(stored.exponents, self._scale_addresses, numbers)
        return scaled(values, exponents, stored.scale, dtype=self._dtype)

    def _copied(self, parts: Sequence[Tensor], addresses: Tensor, numbers: Tensor) -> Tensor:
        from flare_ray.device.ops.row_gather import numba

        return numba.gather(addresses, numbers, rows=parts[0].shape[0], like=parts[0])


def scaled(values: Tensor, exponents: Tensor | None, scale: float, *, dtype: torch.dtype) -> Tensor:
    """Rows [R, D] times 2^(exponents [R, groups] uint8 - 127) where there are any, times `scale`.

    The products are float32 ones, rounded once more where `dtype` is narrower.
    """
    if exponents is not None:
        powers = (exponents.to(torch.int32) << 23).view(torch.float32).unsqueeze(-1)
        grouped = values.to(torch.float32).unflatten(-1, (exponents.shape[1], -1))
        values = (grouped * powers).flatten(-2)
    return (values if scale == 1.0 else values.to(torch.float32) * scale).to(dtype)

"""Rows of hashed tables, read where the settings want them to lie (contract: M8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flare_ray.device.layers.tables import Fp8Rows, HostRows, PlainRows, TableRows
from flare_ray.device.ops.row_gather.api import RowGather, StoredRows
from flare_ray.device.pinned import host_rows
from flare_ray.errors import CheckpointError
from flare_ray.recipes.declaration import ROWS
from flare_ray.recipes.reading import RankReader


def table_rows(reader: RankReader[Any], names: Sequence[str]) -> TableRows:
    """This rank's rows of a table, its shards one after the other.

    Args:
        names: of the shards, equally long ones.
    Raises:
        CheckpointError: shards are stored unlike each other, or as no table is read.
    """
    weights = reader.weights
    parts = [weights.mapped_rows(name, split=reader.split(ROWS)) for name in names]
    values = [part.values for part in parts]
    exponents = [part.exponents for part in parts if part.exponents is not None]
    (scale,) = {part.scale for part in parts}
    if len({part.dtype for part in values}) > 1:
        raise CheckpointError(f"{names[0]} and its other shards are stored in different types")
    place, device, dtype = weights.keeping.tables, weights.device, weights.dtype
    if place == "disk":
        stored = StoredRows(values, exponents, scale)
        return HostRows(RowGather(stored, dtype=dtype, device=device))
    if place == "host":
        held = StoredRows(
            [_joined_on_host(values, device)],
            [_joined_on_host(exponents, device)] if exponents else [],
            scale,
        )
        return HostRows(RowGather(held, dtype=dtype, device=device))
    if values[0].dtype is torch.float8_e4m3fn:
        kept = _joined(values, values[0].dtype, device)
        powers = _joined(exponents, torch.uint8, device) if exponents else None
        return Fp8Rows(kept, powers, scale, dtype)
    return PlainRows(_joined(values, dtype, device))


def _joined(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Parts one after the other, in a type and place."""
    rows, columns = parts[0].shape
    whole = torch.empty((rows * len(parts), columns), dtype=dtype, device=device)
    return _filled(whole, parts)


def _joined_on_host(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """As stored, in host memory that `device` can read."""
    rows, columns = parts[0].shape
    whole = host_rows(rows * len(parts), columns, dtype=parts[0].dtype, device=device)
    return _filled(whole, parts)


def _filled(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    rows = parts[0].shape[0]
    for number, part in enumerate(parts):
        whole[number * rows : (number + 1) * rows].copy_(part)
    return whole

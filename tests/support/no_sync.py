"""Refuses operators that a captured program cannot hold: those whose result or shape the host must
wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::item",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}


class HostWait(AssertionError):
    """An operator that needs values on the host was called."""


class NoHostWait(TorchDispatchMode):
    """Raises `HostWait` for each such operator called inside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        if {schema.name, f"{schema.name}.{schema.overload_name}"} & WAITS:
            raise HostWait(f"{schema.name} makes the host wait for the device")
        if schema.name == "aten::index" and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
        ):
            raise HostWait("indexing by a mask makes a shape depend on values")
        return func(*args, **(kwargs or {}))

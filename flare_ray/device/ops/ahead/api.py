"""Tensors of a CUDA device that is not there: shapes, strides and types alone.

Which kernels a program needs, and in which specialisation, follows from shapes, types, strides and
alignment of what it is given. So a program can be run on tensors without data, and every kernel
that it would launch is compiled instead (`triton.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CUDA = torch.device("cuda", 0)
_META = torch.device("meta")


def shapes_alone(device: torch.device | str) -> bool:
    """Whether tensors on `device` hold no data here: kernels are compiled ahead, nothing is read.

    What looks at values on the host (a table of hashes, page-locked memory) asks this first.
    """
    kind = torch.device(device).type
    return kind == "meta" or (kind == "cuda" and _ShapesForCuda.open)


@contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Inside, "cuda" means tensors without data, and kernels are compiled into `folder` for the
    architecture that this release is tested on instead of being launched.

    Raises:
        ConfigError: Triton is not installed.
    """
    from flare_ray.device.ops.ahead import triton

    with triton.compiling(folder), _ShapesForCuda():
        yield


class _ShapesForCuda(TorchFunctionMode):
    """Makes tensors on torch's data-less device where CUDA is asked for; they call themselves CUDA
    tensors, which is how operators choose their kernels.

    Attributes:
        open: whether one is active; asked before anything of CUDA is touched.
    """

    open = False

    def __enter__(self) -> Self:
        _ShapesForCuda.open = True
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _ShapesForCuda.open = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Getters are made anew at each access: equal, never identical.
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        if func == Tensor.device.__get__:
            device = func(*args)
            return _CUDA if device == _META else device
        if func is Tensor.is_pinned and args[0].is_meta:
            return True  # host memory that a device reads is shapes alone, too (device/pinned)
        given = {key: _without_cuda(value) for key, value in (kwargs or {}).items()}
        if func is Tensor.to:
            args = tuple(map(_without_cuda, args))
        return func(*args, **given)


def _without_cuda(value: Any) -> Any:
    """A CUDA device as the data-less one, everything else as it is."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    meant = isinstance(value, torch.device) and value.type == "cuda"
    return _META if named or meant else value

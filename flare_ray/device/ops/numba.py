"""How CPU kernels of our own are compiled: numba, to machine code at import, kept on disk.

What Triton is to the GPU, numba is here: it takes the few places where a chain of small torch
operators, or a product of one row, costs more to dispatch than to compute.

Kernels take addresses and sizes, since turning a tensor into an array costs four operators; an
adapter therefore checks type, shape and contiguity before it passes `Tensor.data_ptr()` on, and
holds the tensor until the call returns. Kernels use one thread.

Only the adapters named `numba.py` import this module, and only when a CPU program is built.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import config as numba_config
from numba.extending import intrinsic
from torch import Tensor

from flare_ray.device.ops.replay import notice
from flare_ray.errors import ContractViolation

_logger = logging.getLogger(__name__)

DEVICE = Path(__file__).parent.parent
_config: Any = numba_config
"""numba's settings, attributes that it makes when it is imported."""
REASSOCIATING = {"reassoc", "contract", "nsz"}
"""Sums in any order, fused multiply-adds; no assumption about infinities or NaN."""


def kernel(arguments: str, *, ordered: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function of numbers, or load it from numba's disk cache.

    Args:
        arguments: a letter for each: i = address, size or other integer, f = float.
        ordered: float arithmetic exactly as written, as ties and thresholds need.
    """
    kinds = {"i": types.int64, "f": types.float64}
    signature = types.void(*(kinds[letter] for letter in arguments))
    fast: Any = False if ordered else REASSOCIATING

    def compile_now(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fast}
        try:
            with _own_cache():
                return _noticed(njit(signature, cache=True, **options)(function))
        except RuntimeError as error:
            # Neither the package's folder nor the user's cache can be written to.
            if "cannot cache" not in str(error):
                raise
            _logger.warning("%s is compiled at every start: %s", function.__qualname__, error)
            return _noticed(njit(signature, **options)(function))

    return compile_now


@contextmanager
def _own_cache() -> Iterator[None]:
    """Keep machine code in a folder that is named after all sources it may come from.

    numba itself looks at the file of the kernel alone, and would go on with code into which an
    older form of another file's function was compiled.
    """
    if _config.CACHE_DIR:  # the user's choice
        yield
        return
    _config.CACHE_DIR = str(kernel_cache(DEVICE))
    try:
        yield
    finally:
        _config.CACHE_DIR = ""


@cache
def kernel_cache(folder: Path) -> Path:
    """Where machine code of the sources under `folder` lies; what older ones left is removed."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"llvmlite" in text:
            digest.update(text)
    place = folder / "__pycache__"
    chosen = place / f"kernels-{digest.hexdigest()[:16]}"
    for other in place.glob("kernels-*"):
        if other != chosen:
            shutil.rmtree(other, ignore_errors=True)
    return chosen


def _noticed(compiled: Callable[..., None]) -> Callable[..., None]:
    """A kernel that recordings repeat."""

    def call(*arguments: float) -> None:
        compiled(*arguments)
        notice(compiled, arguments)

    return call


def float_rows(x: Tensor, columns: int) -> Tensor:
    """Contiguous rows [R, columns] float32 for a kernel, which would read past anything else.

    Raises:
        ContractViolation: another type or size.
    """
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise ContractViolation(f"{x.dtype} rows of {x.shape[-1]}, expected float32 of {columns}")
    return x.contiguous()


def inner(function: Callable[..., Any]) -> Any:
    """A function that kernels call; compiled with them, sums in any order."""
    return njit(function, error_model="numpy", fastmath=REASSOCIATING)


def inner_ordered(function: Callable[..., Any]) -> Any:
    """As `inner`, with float arithmetic as written."""
    return njit(function, error_model="numpy")


@intrinsic
def _typed_pointer(context: Any, address: Any, element: Any) -> Any:
    """A typed pointer to an address; `element` is a numpy scalar type."""
    target = types.CPointer(element.dtype)

    def convert(inside: Any, builder: Any, _type: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], inside.get_value_type(target))

    return target(address, element), convert


_pointer: Any = _typed_pointer


@njit
def vector(address, size, element):
    """[size] elements at an address."""
    return carray(_pointer(address, element), (size,))


@njit
def matrix(address, rows, columns, element):
    """[rows, columns] elements at an address."""
    return carray(_pointer(address, element), (rows, columns))


@njit
def cube(address, first, rows, columns, element):
    """[first, rows, columns] elements at an address."""
    return carray(_pointer(address, element), (first, rows, columns))


@njit
def aligned(rows, columns):
    """[rows, columns] float32 zeros from the start of a cache line on: a vector that lies across
    two lines costs two accesses."""
    spare = np.zeros(rows * columns + 16, np.float32)
    first = (-np.int64(spare.ctypes.data) % 64) // 4
    return spare[first : first + rows * columns].reshape(rows, columns)


@inner
def dot1(x, line, a):
    """Product of row a and one line."""
    s = np.float32(0.0)
    for i in range(line.shape[0]):
        s += x[a, i] * line[i]
    return s


@inner
def dot4(x, line, a):
    """Products of rows a to a + 3."""
    s, t = np.float32(0.0), np.float32(0.0)
    u, v = np.float32(0.0), np.float32(0.0)
    for i in range(line.shape[0]):
        w = line[i]
        s += x[a, i] * w
        t += x[a + 1, i] * w
        u += x[a + 2, i] * w
        v += x[a + 3, i] * w
    return s, t, u, v

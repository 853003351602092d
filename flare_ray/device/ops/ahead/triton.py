"""Triton without a device: what is launched is compiled for an architecture that is named.

The compiler needs none; the launcher asks the driver for the target, hence the stand-in. Its cache
finds a kernel by source, specialisation, target and compiler, never by path, so that what lies in
the folder is found by a process with a device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

ARCHITECTURE = 90
"""Compute capability times ten, of the one that `tests/gpu` has passed on (H100, H200)."""
WARP = 32


class _Target:
    """As much of a driver as is asked before a launch."""

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", ARCHITECTURE, WARP)

    def get_current_device(self) -> int:
        """Kernels are remembered by device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing runs on it."""
        return 0


def _compile_only(kernel: Any, grid: Any) -> Callable[..., Any]:
    """What `kernel[grid]` is, without the launch."""
    return functools.partial(kernel.warmup, grid=grid)


@contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Inside, calls of kernels compile them into `folder` and launch nothing."""
    # The driver by its name, not by its reset, which looks for a device at once.
    launched, active = KernelInterface.__getitem__, driver._active
    place = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    KernelInterface.__getitem__ = _compile_only
    driver.set_active(_Target())
    try:
        yield
    finally:
        driver._active = active
        KernelInterface.__getitem__ = launched
        if place is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = place

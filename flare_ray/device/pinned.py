"""Host memory that CUDA programs read in place."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from flare_ray.device.ops.ahead.api import shapes_alone
from flare_ray.errors import CapacityError


def host_rows(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns] in host memory, undefined; page-locked where `device` is CUDA.

    The memory is registered instead of taken from torch's allocator of page-locked memory, which
    rounds up to a power of two: 47 GiB would take 64. It has pages of its own, since no page may
    be registered twice, and is let go with the tensor.

    Raises:
        CapacityError: the system does not lock so much.
    """
    if device.type != "cuda":
        return torch.empty((rows, columns), dtype=dtype)
    if shapes_alone(device):
        return torch.empty((rows, columns), dtype=dtype, device=device)
    num_bytes = rows * columns * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    address, runtime = made.data_ptr(), torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if result:
        raise CapacityError(
            f"{num_bytes} bytes of host memory could not be locked for CUDA (error {result}); "
            "raise the limit of locked memory (ulimit -l), free host memory, or set tables: device"
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return made.view(dtype).view(rows, columns)

"""Host memory that CUDA programs read in place."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.errors import CapacityError


def host_rows(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns] in host memory, undefined; page-locked where `device` is CUDA.

    The memory is registered instead of taken from torch's allocator of page-locked memory, which
    rounds up to a power of two: 47 GiB would take 64. It stays locked until the process ends.

    Raises:
        CapacityError: the system does not lock so much.
    """
    made = torch.empty((rows, columns), dtype=dtype)
    if device.type != "cuda":
        return made
    num_bytes = made.numel() * made.element_size()
    result = int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), num_bytes, 0))
    if result:
        raise CapacityError(
            f"{num_bytes} bytes of host memory could not be locked for CUDA (error {result}); "
            "raise the limit of locked memory (ulimit -l), free host memory, or set tables: device"
        )
    return made

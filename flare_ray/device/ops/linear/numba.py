"""Products by a constant matrix on CPU: panels, any number of rows (`device.ops.panels`)."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.numba import float_rows, kernel
from flare_ray.device.ops.panels.numba import narrows, packed, product_narrow, product_wide


@kernel("iiiiiii")
def _multiply(x, panels, out, rows, columns, depth, narrow):
    if narrow:
        product_narrow(x, panels, out, rows, columns, depth)
    else:
        product_wide(x, panels, out, rows, columns, depth)


def stored(weight: Tensor) -> Tensor:
    """Panels of a float32 matrix, in bfloat16 if that is exact."""
    return packed(weight, narrow=narrows(weight))


def multiply(x: Tensor, panels: Tensor, columns: int) -> Tensor:
    """[R, in] float32 and the `stored` panels of [columns, in] -> [R, columns] float32."""
    depth = panels.shape[-2]
    x = float_rows(x, depth)
    rows = x.shape[0]
    out = torch.empty((rows, columns))
    narrow = panels.dtype == torch.bfloat16
    _multiply(x.data_ptr(), panels.data_ptr(), out.data_ptr(), rows, columns, depth, narrow)
    return out

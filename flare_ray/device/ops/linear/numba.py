"""Products by a constant matrix on CPU: panels, any number of rows (`device.ops.panels`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.numba import cube, float_rows, kernel
from flare_ray.device.ops.panels.numba import PANEL, narrows, packed, product_narrow, product_wide


@kernel("iiiiiii")
def _multiply(x, panels, out, rows, columns, depth, narrow):
    if narrow:
        product_narrow(x, panels, out, rows, columns, depth)
    else:
        product_wide(x, panels, out, rows, columns, depth)


@kernel("iiiiiiii")
def _multiply_parts(x, panels, out, rows, parts, columns, depth, narrow):
    values = cube(x, rows, parts, depth, np.float32)
    results = cube(out, rows, parts, columns, np.float32)
    inputs, outputs = np.empty((rows, depth), np.float32), np.empty((rows, columns), np.float32)
    source, target = inputs.ctypes.data, outputs.ctypes.data
    part_bytes = -(-columns // PANEL) * PANEL * depth * (2 if narrow else 4)
    for part in range(parts):
        inputs[:] = values[:, part]
        if narrow:
            product_narrow(source, panels + part * part_bytes, target, rows, columns, depth)
        else:
            product_wide(source, panels + part * part_bytes, target, rows, columns, depth)
        results[:, part] = outputs


def stored(weight: Tensor) -> Tensor:
    """Panels of float32 matrices [..., out, in], in bfloat16 if that is exact."""
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


def multiply_parts(x: Tensor, panels: Tensor, columns: int) -> Tensor:
    """[R, G in] float32 and the `stored` panels of [G, columns, in] -> [R, G columns] float32."""
    parts, depth = panels.shape[0], panels.shape[-2]
    x = float_rows(x, parts * depth)
    rows = x.shape[0]
    out = torch.empty((rows, parts * columns))
    sizes = (rows, parts, columns, depth, panels.dtype == torch.bfloat16)
    _multiply_parts(x.data_ptr(), panels.data_ptr(), out.data_ptr(), *sizes)
    return out

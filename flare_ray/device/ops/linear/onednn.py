"""oneDNN products with a packed constant matrix, by the operators torch's own compiler uses.

They are not part of torch's documented interface: pyproject.toml bounds the torch releases, and
tests/ops/test_linear.py compares them with F.linear. A torch built without oneDNN has no pack
operator; `can_pack` then says no and nothing here is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED_FOR_ROWS = 8
"""Rows the layout is chosen for: a full verification width. Layouts for 8 and for 64 rows measured
the same from 1 to 512 rows; the one for a single row is slower from two rows on."""


def can_pack(weight: Tensor) -> bool:
    """Whether this torch build packs such a matrix."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack(weight: Tensor) -> Tensor:
    """The opaque packed form of [out, in]."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


def multiply(x: Tensor, packed: Tensor) -> Tensor:
    """[R, in] float32 -> [R, out] float32."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return result

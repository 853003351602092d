"""Power-of-two scales: they change a value's exponent alone, so what was exact stays exact."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two that is at least `x`, elementwise; float32, normal and positive.

    Built from the exponent's bits: `exp2` and `ldexp` are not exact on every device.
    """
    mantissa, exponent = torch.frexp(x.to(torch.float32))
    power = (exponent - (mantissa == 0.5).int()).clamp(-126, 127).to(torch.int32)
    return ((power + 127) << 23).view(torch.float32)

"""Power-of-two scales: they change a value's exponent alone, so what was exact stays exact."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two that is at least `x`, elementwise; float32, positive, not subnormal."""
    mantissa, exponent = torch.frexp(x.to(torch.float32))
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())

"""Memory that nobody may read before it was written."""

from __future__ import annotations

from torch import Tensor

NO_TOKEN = -(2**40) + 12345
"""An integer that is no token, position or page."""


def poison(tensor: Tensor) -> None:
    """Fill with NaN, integers with a number that means nothing."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else NO_TOKEN)

"""Shape checks at the operators' door: host-known sizes only, never the values."""

from __future__ import annotations

from torch import Tensor

from flare_ray.errors import ContractViolation


def expect_shape(what: str, value: Tensor, *sizes: int | None) -> None:
    """Compare a tensor's shape; None = any size.

    Raises:
        ContractViolation: the number of dimensions or a size differs.
    """
    shape = value.shape
    if len(shape) == len(sizes):
        for got, wanted in zip(shape, sizes, strict=True):
            if wanted is not None and got != wanted:
                break
        else:
            return
    wanted_text = ", ".join("any" if size is None else str(size) for size in sizes)
    raise ContractViolation(f"{what} has shape {list(shape)}, expected [{wanted_text}]")

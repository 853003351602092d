"""The one order in which ranks' contributions are added."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sum_in_rank_order(values: Sequence[Tensor]) -> Tensor:
    """((v0 + v1) + v2) + ... as a new tensor, in the tensors' own type.

    Floating-point addition is not associative: ranks that added in different orders, or over
    differently grouped partial sums, would hold different bits. All groups on the CPU use this
    function, so threads and processes agree too.
    """
    if len(values) == 1:
        return values[0].clone()
    total = values[0] + values[1]
    for value in values[2:]:
        total += value
    return total

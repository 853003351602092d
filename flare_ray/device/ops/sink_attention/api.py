"""Multi-query attention over listed rows that are key and value at once, beside a learned sink.

The sink is one more logit per head that takes weight and adds no value. Rows come in two lists,
since the latest positions and the selected older entries lie in different pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.sink_attention import reference
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class Listed:
    """Rows of one pool: pool [M, D]; index [R, N] int64, -1 = hidden.

    Whatever hidden or unlisted rows hold does not matter, infinities and NaN included.
    """

    pool: Tensor
    index: Tensor


def sink_attention(
    query: Tensor, lists: tuple[Listed, ...], sink: Tensor, *, scale: float
) -> Tensor:
    """Attend to the listed rows.

    Args:
        query: [R, H, D].
        lists: one or two.
        sink: [H] float32, not scaled.
        scale: factor on the products.
    Returns:
        [R, H, D]; 0 where every entry is hidden.
    Raises:
        ContractViolation: shapes disagree.
    """
    rows, heads, dim = query.shape
    expect_shape("sink", sink, heads)
    if not 1 <= len(lists) <= 2:
        raise ContractViolation(f"{len(lists)} lists of rows, expected one or two")
    for listed in lists:
        expect_shape("pool", listed.pool, None, dim)
        expect_shape("index", listed.index, rows, None)
    if query.device.type == "cpu" and query.dtype == lists[0].pool.dtype == torch.float32:
        from flare_ray.device.ops.sink_attention import numba

        return numba.sink_attention(query, lists, sink, scale=scale)
    return reference.sink_attention(query, lists, sink, scale=scale)
